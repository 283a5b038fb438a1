"""The sides of a comparison in one process each, one after the other: each has the device's memory alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastpack_trl.bench.plan import RoundPlan
from fastpack_trl.errors import UserError, describe

ISOLATED = "one process per side, one side after the other: a drift of the machine does not cancel in the ratio"
_KILL_AFTER = 10.0  # seconds that an interrupted process has to end by itself


def isolated(
    config: str, flags: Sequence[str], sides: Sequence[str], plan: RoundPlan, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare as `compare` does, for a YAML; the gate is checked when a second side has its losses.

    Args:
        config: the YAML.
        flags: options of ``fastpack-trl sft`` that override it.
        sides: names; the order of the processes is that of `SIDES`.
        plan: how much.
        settings: of the record, beside the plan's.

    Raises:
        UserError: see `compare`.
    """
    from fastpack_trl.bench.baselines import OURS, SIDES
    from fastpack_trl.bench.compare import bar, record_of
    from fastpack_trl.bench.row import assemble
    from fastpack_trl.measure.record import OtherLoad

    parts: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    complete, gate, load = True, None, OtherLoad()
    ordered = [name for name in SIDES if name in sides]
    with bar("sides", len(ordered)) as progress:
        try:
            for name in ordered:
                progress.set_postfix_str(name)
                found = _run_one(config, flags, name, plan)
                if "failed" in found:
                    failed[name] = found["failed"]
                else:
                    parts[name] = found
                    gate = _gate(parts, name, plan, failed, subject=OURS) or gate
                progress.update()
        except KeyboardInterrupt:
            complete = False
    if not parts and complete:
        raise UserError("no side could be measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    rows = []
    if parts:
        more = {"isolation": ISOLATED, "gate": gate, "order": list(parts), "other_load": load.cores()}
        rows = [{**assemble(parts, failed, OURS), **more}]
    return record_of(rows, plan, complete, **settings)


def _gate(
    parts: dict[str, dict[str, Any]], name: str, plan: RoundPlan, failed: dict[str, str], *, subject: str
) -> dict[str, Any] | None:
    """Compare the losses and tokens of the newest side with the first one's."""
    import torch

    from fastpack_trl.bench.parity import check_batches, check_loss, tolerance

    first = next(iter(parts))
    if first == name:
        return None
    dtype = getattr(torch, parts[first]["setting"]["dtype"])
    dropout = parts[first]["dropout"]
    checked = plan.checked(dropout != "none")
    pairs = list(zip(parts[first]["steps"], parts[name]["steps"], strict=False))
    try:
        for index, (expected, own) in enumerate(pairs):
            check_batches({first: expected["digest"], name: own["digest"]}, index + 1)
            if index < checked:
                check_loss({first: expected["loss"], name: own["loss"]}, index + 1, dtype, [name])
    except UserError as error:
        if name == subject:
            raise
        failed[name] = str(error)
        del parts[name]
        return None
    if not plan.gate_steps:
        return None
    losses = [{side: part["steps"][index]["loss"] for side, part in parts.items()} for index in range(checked)]
    name_of = str(dtype).removeprefix("torch.")
    return {"dtype": name_of, "tolerance": tolerance(dtype), "steps": losses, "dropout": dropout}


def _run_one(config: str, flags: Sequence[str], side: str, plan: RoundPlan) -> dict[str, Any]:
    import torch

    task = {
        "config": config,
        "flags": list(flags),
        "side": side,
        "plan": {**asdict(plan), "profile": None if plan.profile is None else str(plan.profile)},
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        asked, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(task), encoding="utf-8")
        command = [sys.executable, "-m", "fastpack_trl.bench.isolation", str(asked), str(answer)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - ourselves
            try:
                _, errors = process.communicate()
            except KeyboardInterrupt:
                process.terminate()
                try:
                    process.communicate(timeout=_KILL_AFTER)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        if not answer.exists():
            last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return {"failed": f"its process ended: {last}"}
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise UserError(f"{side}: {found['error']}")
    return found


def measure_one(task: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one side in this process: its part of a row, each step's loss and digest, or ``failed``, or ``error``."""
    import torch

    from fastpack_trl.bench.baselines import plan_of
    from fastpack_trl.bench.environment import one_bar
    from fastpack_trl.bench.parity import without_dropout
    from fastpack_trl.bench.row import part_of
    from fastpack_trl.bench.side import Side
    from fastpack_trl.bench.yaml_build import yaml_build
    from fastpack_trl.measure.failures import FAILURES, describe_failure

    torch.set_num_threads(task["threads"])
    profile = task["plan"]["profile"]
    plan = RoundPlan(**{**task["plan"], "profile": None if profile is None else Path(profile)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side: Side | None = None
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder, one_bar():
        build = yaml_build(task["config"], task["flags"], folder)
        try:
            side = Side(task["side"], plan_of(task["side"], device), build, plan.changes, plan.seed)
            side.begin(plan.seed)
            with without_dropout([side.trainer.model]) as dropped:
                for _ in range(plan.gate_steps):
                    side.step()
            for _ in range(plan.gate_steps, plan.rounds):
                side.step()
            side.extras_of(plan)
        except UserError as error:
            return {"error": describe(error)}
        except FAILURES as error:
            return {"failed": describe_failure(error)}
        finally:
            if side is not None:
                side.close()
        steps = [{"loss": step.loss, "digest": step.digest} for step in side.steps]
        return {
            **part_of(side, plan, plan.rounds),
            "steps": steps,
            "dropout": "off in these steps" if dropped else "none",
        }


def main(asked: str, answer: str) -> None:
    """Read a task, measure, write the answer."""
    from fastpack_trl.measure.record import write_json

    write_json(Path(answer), measure_one(json.loads(Path(asked).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(*sys.argv[1:])
