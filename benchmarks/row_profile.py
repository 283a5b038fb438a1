"""Where the device's time of a row of `benchmarks.side_by_side` goes, kind by kind, beside the least it could take.

    python -m benchmarks.row_profile --rows "qwen3-8b lora 4096" --json FILE

One process per row and side, trained as in `benchmarks.side_by_side`; its last two steps are profiled with the shapes
of what operators are given. The micro-step is not replayed as a graph here, since its kernels would have no operators:
the kernels are the same, launches and idle time are not (`benchmarks.side_by_side` has those). On a CPU, operators take
the place of kernels: that shows that it runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.command import CaseCommand
from benchmarks.kernel_kinds import KINDS, UNKNOWN, Facts, by_kind, largest, launches_of
from benchmarks.readme_cells import grid
from benchmarks.side_by_side import WATCHED
from benchmarks.step_bounds import TERABYTES, TFLOPS, Device, bound_seconds, work_of
from benchmarks.training_rows import FIRST, ROWS
from benchmarks.training_side import OURS, SIDES, device_here, train_side
from fastpack_trl.bench.run_watch import RunWatch
from fastpack_trl.bench.training_run import OwnProcess, TrainingRun
from fastpack_trl.bench.views import device_of

CASE = "row_profile"
TIMEOUT = 240
PROFILED, TIMED = WATCHED["profiled"], 12
_SHOWN, _NAMED = 4, 12
"""Kernels of each kind, and kernels without a kind, that a record names."""


def measure_side(row: Mapping[str, Any], side: str, *, seed: int, tflops: float, terabytes: float) -> dict[str, Any]:
    """Train one side in this process; return its profile (`profile_of`)."""
    fields: dict[str, Any] = {"cuda_graph": "off"} if SIDES[side].ours else {}
    watched = {**WATCHED, "timed": TIMED, "shapes": True}
    logged = WATCHED["multiple"]
    trainer, watch = train_side(ROWS[row["row"]], SIDES[side], seed, watched, logging_steps=logged, **fields)
    return profile_of(trainer, watch, device_here(), Device(tflops * 1e12, terabytes * 1e12))


def profile_of(trainer: Any, watch: RunWatch, device: str, peaks: Device) -> dict[str, Any]:
    """Return the kernels of a run of `train_side` by kind, with their bounds, per step."""
    found = watch.figures(trainer)
    tokens = found["timed_tokens"] / len(found["step_seconds"])
    kinds = kinds_of(trainer, watch, tokens, device, peaks)
    whole = sum(kind["seconds"] for kind in kinds.values())
    step = median(found["step_seconds"])
    profile = found["profile"]
    return {
        "step_seconds": step, "tokens_per_step": tokens, "kinds": kinds,
        "classified": 1 - kinds.get(UNKNOWN, {"seconds": 0.0})["seconds"] / whole,
        "idle": max(0.0, 1 - profile["busy_seconds"] / step) if device == "cuda" else None,
        "launches": profile["launches"] if device == "cuda" else None,
    }  # fmt: skip


def kinds_of(trainer: Any, watch: RunWatch, tokens: float, device: str, peaks: Device) -> dict[str, dict[str, Any]]:
    """Return, by kind and for one of the profiled steps, seconds, launches, bound and the largest kernels."""
    model = trainer.model
    work = work_of(model, tokens, document_lengths(trainer.train_dataset))
    facts = Facts(work.vocabulary, round(work.slots))
    found = by_kind(launches_of(watch.events, device), facts)
    return {
        kind: {
            "seconds": sum(launch.seconds for launch in launches) / PROFILED,
            "launches": len(launches) / PROFILED,
            "bound_seconds": bound_seconds(kind, launches, PROFILED, work, peaks),
            "largest": _per_step(largest(launches, _NAMED if kind == UNKNOWN else _SHOWN)),
        }
        for kind, launches in found.items()
    }


def document_lengths(dataset: Any) -> list[int]:
    """Return the tokens of every document of a data set as TRL has prepared it, packed or not."""
    if "seq_lengths" in dataset.column_names:
        return [length for row in dataset["seq_lengths"] for length in row]
    return [len(ids) for ids in dataset["input_ids"]]


def _per_step(entries: list[list[Any]]) -> list[list[Any]]:
    return [[name, seconds / PROFILED, count / PROFILED] for name, seconds, count in entries]


def tasks(args: Namespace) -> list[TrainingRun]:
    """Return the sides of rows, each in a process of its own."""
    options = {"seed": args.seed, "tflops": args.tflops, "terabytes": args.terabytes}
    here = OwnProcess("benchmarks.row_profile:measure_side", options, timeout=TIMEOUT)
    labels = [{"row": row, "tokens": ROWS[row].tokens} for row in args.rows]
    return [TrainingRun(label, side, here) for label in labels for side in args.sides]


def settings(args: Namespace) -> dict[str, Any]:
    """Return the steps that are profiled and the peaks that the bounds are of."""
    return {"profiled": PROFILED, "tflops": args.tflops, "terabytes_per_second": args.terabytes}


ENOUGH = 0.95
"""Share of the device's time that has a kind; below it the table says so."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a column per row and side; of each kind its milliseconds, and its bound in brackets."""
    rows = [row for row in record["rows"] if row.get("kinds")]
    kinds = [kind for kind in KINDS if any(kind in row["kinds"] for row in rows)]
    settings = record["settings"]
    head = (
        f"**Where the device's time of a step goes, {device_of(record)}.** Milliseconds per step, in brackets the "
        f"least that this kind could take at {settings['tflops']:,.0f} TFLOP/s and "
        f"{settings['terabytes_per_second']:g} TB/s (`benchmarks/step_bounds.py` has the formulas; products as they "
        "were run, recomputation included). Kernels are launched one by one here: idle share and launches are those "
        "of a step that is not replayed as a graph."
    )
    titles = [row["row"] if row["side"] == "fastpack" else f"{row['row']}, {row['side']}" for row in rows]
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {kind: partial(_kind, kind) for kind in kinds}
    figures = [[name, *map(cell, rows)] for name, cell in {**cells, **_SUMMARY}.items()]
    lines = [head, "", grid(" | ".join(["kind", *(f">{name}" for name in titles)]), figures)]
    notes = [f"- {record['corrected']}"] if "corrected" in record else []
    notes += [note for row in rows for note in _notes(row)]
    notes += [f"- {row['row']}, {row['side']}: {_why(row)}" for row in record["rows"] if not row.get("kinds")]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _kind(kind: str, row: Mapping[str, Any]) -> str:
    found = row["kinds"].get(kind)
    return "-" if found is None else f"{_ms(found['seconds'])} ({_ms(found['bound_seconds'])})"


def _sum(row: Mapping[str, Any]) -> str:
    seconds, bound = (sum(kind[part] for kind in row["kinds"].values()) for part in ("seconds", "bound_seconds"))
    return f"{_ms(seconds)} ({_ms(bound)})"


def _farthest(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the kind whose time lies farthest above its bound, and by how many seconds."""
    gaps = {kind: one["seconds"] - one["bound_seconds"] for kind, one in row["kinds"].items()}
    worst = max(gaps, key=gaps.__getitem__)
    return worst, gaps[worst]


_SUMMARY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "sum": _sum,
    "farthest above its bound": lambda row: f"{_farthest(row)[0]}: {_ms(_farthest(row)[1])}",
    "step": lambda row: _ms(row["step_seconds"]),
    "idle": lambda row: "-" if row["idle"] is None else f"{row['idle']:.0%}",
    "launches": lambda row: "-" if row["launches"] is None else f"{row['launches']:,.0f}",
}
"""Lines below those of the kinds."""


def _notes(row: Mapping[str, Any]) -> list[str]:
    """Return the kernels without a kind, and the largest of the kind that is farthest above its bound."""
    found, (worst, _) = row["kinds"], _farthest(row)
    named = "; ".join(f"`{_cut(name)}` {_ms(seconds)} ms in {count:,.0f}" for name, seconds, count in
                      found[worst]["largest"])  # fmt: skip
    notes = [f"- {row['row']}, {row['side']}: largest of *{worst}*: {named}."]
    if row["classified"] < ENOUGH:
        names = ", ".join(f"`{_cut(name)}`" for name, *_ in found[UNKNOWN]["largest"])
        notes.append(f"- {row['row']}, {row['side']}: only {row['classified']:.0%} of the time has a kind: {names}.")
    return notes


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _cut(name: str, length: int = 60) -> str:
    return (name if len(name) <= length else f"{name[: length - 3]}...").replace("|", "/")


def _why(row: Mapping[str, Any]) -> str:
    return str(row.get("failed") or row.get("skipped") or "-").splitlines()[-1]


def add_options(parser: ArgumentParser) -> None:
    """Add the peaks of the device."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    terabytes = TERABYTES.get(name, TERABYTES["NVIDIA H200"])
    add = parser.add_argument
    add("--tflops", type=float, default=TFLOPS, help="of a large bf16 product (default: %(default)s)")
    add("--terabytes", type=float, default=terabytes, help="per second of memory (default: the data sheet's)")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=FIRST, sides=SIDES, default_sides=(OURS,),
    tasks=tasks, settings=settings, table=table, alike=True, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
