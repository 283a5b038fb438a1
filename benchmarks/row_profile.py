"""Where the device's time of a row of `benchmarks.side_by_side` goes, kind by kind, beside the least it could take.

    python -m benchmarks.row_profile --rows "qwen3-8b lora 4096" --json FILE

One process per row and side, trained as in `benchmarks.side_by_side`; its last two steps are profiled with the shapes
of what operators are given. The micro-step is not replayed as a graph here, since its kernels would have no operators:
the kernels are the same, launches and idle time are not (`benchmarks.side_by_side` has those). On a CPU, operators take
the place of kernels: that shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.captured import Row
from benchmarks.kernel_kinds import UNKNOWN, Facts, by_kind, largest, launches_of
from benchmarks.one_line import in_one_line, record_of
from benchmarks.own_process import answer_of
from benchmarks.profile_table import table
from benchmarks.row_loop import RowTask, run_rows
from benchmarks.side_by_side import FIRST, OURS, ROWS, SIDES, known, train_side
from benchmarks.side_watch import PROFILED, Watch, figures_of
from benchmarks.step_bounds import TERABYTES, TFLOPS, Device, bound_seconds, work_of
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.measure.record import check_writable

CASE = "row_profile"
TIMEOUT = 240
_SHOWN, _NAMED = 4, 12
"""Kernels of each kind, and kernels without a kind, that a record names."""


def measure_row(row: Row, side: str, device: str, seed: int, peaks: Device) -> dict[str, Any]:
    """Train one side in this process; return its profile (`profile_of`)."""
    fields: dict[str, Any] = {"cuda_graph": "off"} if SIDES[side].ours else {}
    return profile_of(*train_side(row, side, device, seed, shapes=True, **fields), device, peaks)


def profile_of(trainer: Any, watch: Watch, device: str, peaks: Device) -> dict[str, Any]:
    """Return the kernels of a run of `train_side` by kind, with their bounds, per step."""
    found = figures_of(watch, trainer.state.log_history, device)
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


def kinds_of(trainer: Any, watch: Watch, tokens: float, device: str, peaks: Device) -> dict[str, dict[str, Any]]:
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


def measure(
    rows: Sequence[str], sides: Sequence[str], *, seed: int, peaks: Device, seconds: float = math.inf,
    file: ResultFile | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Profile sides of rows, each in a process of its own; one that fails is an entry with its error.

    Raises:
        UserError: an unknown row or side; `file` holds another run.
    """
    known(rows, sides)
    tasks = [
        RowTask(
            {"setting": f"{row}, {side}", "row": row, "side": side, "tokens": ROWS[row].tokens},
            partial(_run, row, side, seed, peaks), empty={},
        )
        for row in rows for side in sides
    ]  # fmt: skip
    settings = {"profiled": PROFILED, "tflops": peaks.flops / 1e12, "terabytes_per_second": peaks.bandwidth / 1e12}
    return run_rows(
        tasks, case=CASE, settings=settings, apart={"seconds": seconds}, seconds=seconds, alike=True,
        threads=torch.get_num_threads(), device="cuda" if torch.cuda.is_available() else "cpu", seed=seed, file=file,
        progress=progress,
    )  # fmt: skip


def _run(row: str, side: str, seed: int, peaks: Device, seconds: float) -> dict[str, Any]:
    arguments = ("--rows", row, "--sides", side, "--seed", seed, "--here", *_peak_arguments(peaks))
    return answer_of("benchmarks.row_profile", arguments, TIMEOUT)


def _peak_arguments(peaks: Device) -> tuple[object, ...]:
    return "--tflops", peaks.flops / 1e12, "--terabytes", peaks.bandwidth / 1e12


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.row_profile``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_profile", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(FIRST), help=f"of {', '.join(ROWS)} (default: the first 6)")
    parser.add_argument("--sides", nargs="+", default=[OURS], help=f"of {', '.join(SIDES)} (default: {OURS})")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="of a large bf16 product (default: %(default)s)")
    parser.add_argument("--terabytes", type=float, help="per second of memory (default: of this device's data sheet)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all rows; the next command goes on")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
    parser.add_argument("--again", action="store_true", help="measure anew what FILE has")
    parser.add_argument("--report", metavar="FILE", help="print the table of a record and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peaks = Device(args.tflops * 1e12, 1e12 * (args.terabytes or TERABYTES.get(name, TERABYTES["NVIDIA H200"])))
    if args.here:  # in the process of one row
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = measure_row(ROWS[args.rows[0]], args.sides[0], device, args.seed, peaks)
        Path(args.json).write_text(json.dumps(found), encoding="utf-8")
        return
    if args.report is not None:
        print(table(record_of(args.report, CASE)))
        return
    file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
    record = measure(args.rows, args.sides, seed=args.seed, peaks=peaks, seconds=args.seconds, file=file)
    if file is not None:
        file.save(record)
    print(table(record))


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.row_profile", main))
