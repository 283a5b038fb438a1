"""Whole optimizer steps of ``train()`` with the micro-step captured, and eager: one process per row, the sides in turn.

A side is a `FastSFTTrainer` at its defaults over the same model; they differ in ``cuda_graph`` only. Time is that of
the trainer's own loop between two steps at whose ends the device has finished, launches and the time of kernels are of
a profile of some steps after it. Real text, public shapes with random weights.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.command import CaseCommand
from benchmarks.training_rows import FIRST, LONGEST_DOCUMENT, ROWS, material
from benchmarks.training_side import Side, device_here, train_side
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.training_run import OwnProcess
from fastpack_trl.measure.rounds import turn_order

CASE = "captured"
SIDES = {"eager": "off", "captured": "auto"}
"""Name and ``cuda_graph`` of each side."""
WATCHED = {"warmup": 40, "timed": 30, "span": 10, "profiled": 4}
"""Of `RunWatch`."""
DEFAULT_ROWS = (*FIRST[:2], "llama-3.2-1b full 2048", *FIRST[3:])
TIMEOUT = 560


class HeldMemory(TrainerCallback):
    """Reads what torch holds of the device after the last timed step."""

    gib = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WATCHED["warmup"] + WATCHED["timed"] and torch.cuda.is_available():
            self.gib = torch.cuda.memory_reserved() / 2**30


def measure_row(row: Mapping[str, Any], side: str, *, rounds: int, seed: int) -> dict[str, Any]:
    """Train both sides of a row in this process, in alternating order from round to round."""
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    one, device = ROWS[row["row"]], device_here()
    given = material(one, device, seed)
    for number in range(rounds):
        for name in turn_order(list(SIDES), number):
            if given["peft_config"] is not None and any(sides.values()):
                given = material(one, device, seed)  # a trainer has put adapters into the last
            fields = {"cuda_graph": SIDES[name], "logging_steps": 10}
            held = HeldMemory()
            trainer, watch = train_side(one, Side(True, fields), seed, WATCHED, given=given, callbacks=[held])
            sides[name].append({**watch.figures(trainer), "held_gib": held.gib})
            del trainer
    return {"sides": sides}


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows, each in a process of its own."""
    here = OwnProcess("benchmarks.captured:measure_row", {"rounds": args.rounds, "seed": args.seed}, timeout=TIMEOUT)

    def run(name: str, seconds: float) -> dict[str, Any]:
        return here({"row": name}, "both")

    return [RowTask({"row": name}, partial(run, name)) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return which steps are left out, timed and profiled, and the sides."""
    return {**WATCHED, "rounds": args.rounds, "sides": SIDES, "longest_document": LONGEST_DOCUMENT}


def table(record: Mapping[str, Any]) -> str:
    """Return a line per run."""
    return "\n".join(line for row in record["rows"] for line in _lines(row))


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    if not row.get("sides"):
        yield f"{row['row']:24} failed: {row.get('failed') or row.get('skipped')}"
    for side, runs in row.get("sides", {}).items():
        for found in runs:
            yield f"{row['row']:24} {side:9} {_said(found)}"


def _said(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    profile, step = found["profile"], median(found["step_seconds"])
    line = found["report"]["features"].get("cuda_graph", {})
    idle = 1 - profile.get("busy_seconds", step) / step
    gib = " of ".join(f"{found.get(name) or 0:.1f}" for name in ("peak_gib", "reserved_gib", "held_gib"))
    return (
        f"{step * 1e3:7.1f} ms a step, kernels {profile.get('busy_seconds', 0) * 1e3:.1f} ms, idle {idle:.0%}, "
        f"{profile.get('launches', 0):.0f} launches, {profile.get('waits', 0):.1f} waits, {gib} GiB, first step "
        f"{found['first_step_seconds']:.1f} s, losses {_losses(found['losses'])}; "
        f"{line.get('path')}: {line.get('reason')}"
    )


def _losses(losses: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Return the losses; older records have no steps beside them."""
    return list(losses.values() if isinstance(losses, Mapping) else losses)


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=DEFAULT_ROWS, tasks=tasks, settings=settings, table=table
)

main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
