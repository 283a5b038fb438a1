"""Whole optimizer steps of ``train()`` with the micro-step captured, and eager: a process per run, the sides in turn.

A side is a `FastSFTTrainer` at its defaults over the same model; they differ in ``cuda_graph`` only. Time is that of
the trainer's own loop between two steps at whose ends the device has finished, launches and the time of kernels are of
a profile of some steps after it. Real text, public shapes with random weights.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.command import CaseCommand
from benchmarks.training_rows import FIRST, LONGEST_DOCUMENT, ROWS
from benchmarks.training_side import Side, train_side
from fastpack_trl.bench.training_run import OwnProcess, TrainingRun, in_turn

CASE = "captured"
SIDES = {"eager": "off", "captured": "auto"}
"""Name and ``cuda_graph`` of each side."""
WATCHED = {"warmup": 40, "timed": 30, "span": 10, "profiled": 4}
"""Of `RunWatch`."""
DEFAULT_ROWS = (*FIRST[:2], "llama-3.2-1b full 2048", *FIRST[3:])
TIMEOUT = 400


def measure_side(row: Mapping[str, Any], side: str, *, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures."""
    fields = {"cuda_graph": SIDES[side], "logging_steps": 10}
    trainer, watch = train_side(ROWS[row["row"]], Side(True, fields), seed, WATCHED)
    return watch.figures(trainer)


def tasks(args: Namespace) -> list[TrainingRun]:
    """Return the runs, each in a process of its own."""
    here = OwnProcess("benchmarks.captured:measure_side", {"seed": args.seed}, timeout=TIMEOUT)
    labels = [{"row": row, "tokens": ROWS[row].tokens} for row in args.rows]
    return list(in_turn(labels, tuple(SIDES), rounds=args.rounds, launcher=here))


def settings(args: Namespace) -> dict[str, Any]:
    """Return which steps are left out, timed and profiled, and the sides."""
    return {**WATCHED, "sides": SIDES, "longest_document": LONGEST_DOCUMENT}


def table(record: Mapping[str, Any]) -> str:
    """Return a line per run."""
    return "\n".join(line for row in record["rows"] for line in _lines(row))


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a run; of an older record, those of a row with all of its runs."""
    for side, runs in (row.get("sides") or {row.get("side", "both"): [row]}).items():
        for found in runs:
            yield f"{row['row']:24} {side:9} {_said(found)}"


def _said(found: Mapping[str, Any]) -> str:
    if "step_seconds" not in found:
        return f"failed: {found.get('failed') or found.get('skipped')}"
    profile, step = found["profile"], median(found["step_seconds"])
    line = found["report"]["features"].get("cuda_graph", {})
    idle = 1 - profile.get("busy_seconds", step) / step
    gib = " of ".join(f"{found.get(name) or 0:.1f}" for name in ("peak_gib", "reserved_gib"))
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
    case=CASE, help=__doc__, rows=ROWS, default_rows=DEFAULT_ROWS, tasks=tasks, settings=settings, table=table,
    alike=True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
