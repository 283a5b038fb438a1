"""Sides of a YAML of ``fastpack-trl sft``: how they are built, and measured in one process each, its memory alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastpack_trl.bench.baselines import OURS, SIDES, recipe_of
from fastpack_trl.bench.compare import bar, check_measured
from fastpack_trl.bench.environment import one_bar
from fastpack_trl.bench.parity import without_dropout
from fastpack_trl.bench.row import assemble, disagreement, part_of
from fastpack_trl.bench.side import Build, RoundPlan, Side
from fastpack_trl.bench.training_run import Launcher, OwnProcess, TrainingRun
from fastpack_trl.errors import preparing
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments

OWN_PROCESS = OwnProcess("fastpack_trl.bench.isolation:measure_side")
ISOLATED = "one process per side, one side after the other: a drift of the machine does not cancel in the ratio"


def yaml_build(config: str, flags: Sequence[str], folder: str) -> Build:
    """Return a `build` for `compare`: each call reads the YAML and loads its model and data anew."""

    def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
        words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
        arguments = short_run_arguments(config, folder, *flags, "--output_dir", folder, *words)
        with preparing():
            return make_trainer(arguments, None, trainer_class)

    return build


def isolated(
    config: str,
    flags: Sequence[str],
    sides: Sequence[str],
    plan: RoundPlan,
    launcher: Launcher = OWN_PROCESS,
) -> tuple[list[dict[str, Any]], bool]:
    """Compare as `compare` does, for a YAML with the options of ``fastpack-trl sft`` that override it, in `flags`.

    The order of the processes is that of `SIDES`; the gate is checked when a second side has its losses.

    Returns:
        The row, none where no side was measured, and whether it is complete.

    Raises:
        UserError: see `compare`.
    """
    asked = {**asdict(plan), "profile": None if plan.profile is None else str(plan.profile)}
    row = {"row": config, "flags": list(flags), "plan": asked, "threads": torch.get_num_threads()}
    parts: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    complete, load = True, OtherLoad()
    ordered = [name for name in SIDES if name in sides]
    with bar("sides", len(ordered)) as progress:
        try:
            for name in ordered:
                progress.set_postfix_str(name)
                found = TrainingRun(row, name, launcher).measure()
                reason = found.get("failed") or _other_steps(parts, name, found, plan)
                if reason:
                    failed[name] = reason
                else:
                    parts[name] = found
                progress.update()
        except KeyboardInterrupt:
            complete = False
    check_measured(parts, failed, complete)
    more = {"isolation": ISOLATED, "order": list(parts), "other_load": load.cores()}
    return [assemble(parts, failed, OURS, plan, **more)] if parts else [], complete


def _other_steps(parts: Mapping[str, Mapping[str, Any]], name: str, found: Mapping[str, Any], plan: RoundPlan) -> str:
    """Return where a side's tokens or losses are not those of the first one; empty if nowhere. Of ours it is raised."""
    for first, part in list(parts.items())[:1]:
        judged = {"dtype": part["setting"]["dtype"], "dropout": part["dropout"], "figure": part["figure"]}
        for number, (expected, own) in enumerate(zip(part["steps"], found["steps"], strict=False), 1):
            if reason := disagreement(number, {first: tuple(expected), name: tuple(own)}, plan, **judged, subject=OURS):
                return reason
    return ""


def measure_side(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Measure one side in this process; return its part of the row."""
    torch.set_num_threads(row["threads"])
    profile = row["plan"]["profile"]
    plan = RoundPlan(**{**row["plan"], "profile": None if profile is None else Path(profile)})
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder, one_bar():
        method = short_run_arguments(row["row"], folder, *row["flags"]).method
        side = Side(name, recipe_of(name, method), yaml_build(row["row"], row["flags"], folder), plan)
        try:
            side.begin()
            with without_dropout([side.trainer.model]) as dropout:
                for _ in range(plan.gate_steps):
                    side.step()
            for _ in range(plan.gate_steps, plan.rounds):
                side.step()
            side.run_extras()
        finally:
            side.close()
        return part_of(side, plan.rounds, dropout)
