"""NF4 LoRA at equal memory: stock with compiled layers and checkpointing, then ours with no more than its peak.

One process per run. The peak is that of all of ``train()``, start-up included. Ours is given the baseline's peak less
model, gradients and optimizer state as ``activation_memory_gib``, and once more with a corrected budget where its
own peak is off. Real text, public shapes with random weights.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.command import CaseCommand
from benchmarks.readme_cells import grid
from benchmarks.training_rows import ROWS
from benchmarks.training_side import OURS, SIDES, train_side
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.training_run import OwnProcess
from fastpack_trl.bench.views import device_of
from fastpack_trl.errors import UserError

CASE = "equal_memory"
BASELINES = {"compiled": "stock compiled", "stock": "stock"}
"""Of `SIDES`, by the name of the command line."""
DEFAULT_ROWS = ("qwen3-14b nf4 4096", "qwen3-8b nf4 4096")
WATCHED = {"warmup": 40, "timed": 30, "span": 10}
"""Of `RunWatch`."""
EXCESS, SHORTFALL = 0.01, 0.05
"""Shares of the baseline's peak by which ours may be over it, and under it before it is given more."""
TRIES = 3
TIMEOUT = 400


def measure_side(
    row: Mapping[str, Any], side: str, *, seed: int, peak_gib: float = 0.0, less_gib: float = 0.0
) -> dict[str, Any]:
    """Train one side in this process; return its figures.

    Args:
        peak_gib: for ours, GiB that all may take together.
        less_gib: GiB to leave of these, as earlier runs were over them.
    """
    from fastpack_trl.run.budget import memory_to_come

    found: dict[str, Any] = {}

    def limit(trainer: Any) -> None:
        allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        fixed = allocated + memory_to_come(trainer.fastpack_run)
        found["budget_gib"] = trainer.args.activation_memory_gib = peak_gib - fixed / 2**30 - less_gib

    made = limit if side == OURS else lambda trainer: None
    fields: dict[str, Any] = {"gradient_checkpointing": True, "logging_steps": 10}
    trainer, watch = train_side(ROWS[row["row"]], SIDES[side], seed, WATCHED, made=made, **fields)
    return {**found, **watch.figures(trainer)}


def is_equal(peak_gib: float, ours: Mapping[str, Any]) -> bool:
    """Return whether a run of ours is at the baseline's peak: not over it, and under it only where it needs no more."""
    excess = ours["peak_gib"] / peak_gib - 1
    return excess <= EXCESS and (excess >= -SHORTFALL or _keeps_all(ours))


def best_of(peak_gib: float, tries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest run of ours that is not over the baseline's peak; None where all are."""
    good = [run for run in tries if "failed" not in run and run["peak_gib"] <= peak_gib * (1 + EXCESS)]
    return min(good, key=lambda run: median(run["step_seconds"]), default=None)


def _keeps_all(ours: Mapping[str, Any]) -> bool:
    """Return whether nothing is recomputed: more memory would not be used."""
    return bool(ours["report"]["features"]["activation_memory"]["path"] == "keep")


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows: the baseline, then ours until it is at the baseline's peak, in processes of their own.

    Raises:
        UserError: there is no device.
    """
    if not torch.cuda.is_available():
        raise UserError("this case measures device memory: it needs a CUDA device")

    def task(name: str) -> RowTask:
        label = {"row": name, "baseline": args.baseline}
        pairs = partial(_pairs, label, args.rounds, args.seed)
        return RowTask(label, lambda seconds: {"pairs": list(pairs())}, empty={"pairs": []})

    return [task(name) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return which steps are left out and timed, and what counts as equal."""
    return {**WATCHED, "rounds": args.rounds, "excess": EXCESS, "shortfall": SHORTFALL}


def _pairs(row: Mapping[str, Any], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    def run(side: str, **budget: float) -> dict[str, Any]:
        options = {"seed": seed, **budget}
        return OwnProcess("benchmarks.equal_memory:measure_side", options, timeout=TIMEOUT)(row, side)

    less = 0.0
    for _ in range(rounds):
        stock = run(BASELINES[row["baseline"]])
        tries: list[dict[str, Any]] = []
        while "failed" not in stock and len(tries) < TRIES:
            tries.append(run(OURS, peak_gib=stock["peak_gib"], less_gib=less))
            if "failed" in tries[-1] or is_equal(stock["peak_gib"], tries[-1]):
                break
            less += tries[-1]["peak_gib"] - stock["peak_gib"]
        best = None if "failed" in stock else best_of(stock["peak_gib"], tries)
        ratio = best and median(stock["step_seconds"]) / median(best["step_seconds"])
        yield {"baseline": stock, "tries": tries, "ratio": ratio}


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: both sides of each pair at the baseline's peak."""
    head = (
        f"**4-bit LoRA at equal memory, {device_of(record)}, torch {record['versions']['torch']}.** fastpack is given "
        "the peak of stock with its layers compiled (*stock compiled*), and may not be over it. On torch 2.11 such "
        "layers do not compute again what the autograd function of a 4-bit layer made, checkpointing or not."
    )
    columns = "model, row | >stock compiled, tokens/s | >fastpack (same memory) | >ratio | >peaks, GiB"
    return f"{head}\n\n{grid(columns, [line for row in record['rows'] for line in _lines(row)])}"


def _lines(row: Mapping[str, Any]) -> Iterator[list[str]]:
    if row.get("skipped"):
        yield [row["row"], row["skipped"], *["-"] * 3]
    for pair in row["pairs"]:
        base = pair["baseline"]
        best = None if "failed" in base else best_of(base["peak_gib"], pair["tries"])
        if best is None:
            failed = [run["failed"] for run in (base, *pair["tries"]) if "failed" in run]
            yield [row["row"], f"failed: {failed[-1]}" if failed else "no run within the peak", *["-"] * 3]
            continue
        tokens = ROWS[row["row"]].tokens
        rates = [f"{tokens / median(run['step_seconds']):,.0f}" for run in (base, best)]
        yield [row["row"], *rates, f"{pair['ratio']:.2f}", f"{base['peak_gib']:.1f} / {best['peak_gib']:.1f}"]


def add_options(parser: ArgumentParser) -> None:
    """Add the option that other cases do not have."""
    parser.add_argument("--baseline", choices=list(BASELINES), default="compiled", help="default: its layers compiled")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=DEFAULT_ROWS, tasks=tasks, settings=settings, table=table,
    more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
