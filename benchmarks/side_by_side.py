"""Whole training as a user would start it, every side in a process of its own, on the same rows of real text.

A side is a trainer at its defaults: nothing of this package is in the others. A run is the beginning of a long one. Its
first steps are left out, six at least, and for fastpack until all that pays back in a long run is on; twelve are timed,
each to the end of the device's work, and two are profiled. Tokens are counted by TRL, without padding. Losses of the
same steps are compared with stock's before times are believed. Public shapes with random weights. A file of ``--json``
grows run by run, and the same command goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import unsloth_folder
from benchmarks.captured import Row, material
from benchmarks.model_shapes import shape_of
from benchmarks.one_line import in_one_line, record_of
from benchmarks.own_process import answer_of
from benchmarks.row_loop import RowTask, run_rows
from benchmarks.side_table import table
from benchmarks.side_watch import (
    LOGGED,
    LONGEST_WARMUP,
    MOST,
    PROFILED,
    SETTLING,
    TIMED,
    WARMUP,
    Watch,
    figures_of,
)
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter
from fastpack_trl.measure.record import check_writable

CASE = "side_by_side"
TIMEOUT = 400
OURS, OURS_FP8 = "fastpack", "fastpack, base in FP8"
COMMON = {
    "max_steps": LONG_RUN, "learning_rate": 1e-4, "logging_steps": LOGGED, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip
"""Arguments of every side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One trainer: fields beside the row's, and what is around its training."""

    ours: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    """Decoder layers compiled one by one, by accelerate."""


SIDES = {
    "stock": Side(),
    "stock compiled": Side(compiled=True),
    "stock + Liger": Side(fields={"use_liger_kernel": True}),
    "fastpack (same memory)": Side(True, {"activation_memory": "checkpoint", "cache_dequantized": "off"}),
    OURS: Side(True),
    OURS_FP8: Side(True, {"frozen_base": "fp8"}),
}
UNSLOTH = "unsloth"
"""Runs in an environment of its own, whose Python ``--unsloth`` names."""
DEFAULT_SIDES = ("stock", "stock compiled", OURS)
SMALL = Row("small", 512, "lora")
ROWS = {
    row.name: row
    for row in (
        Row("qwen3-0.6b", 2048, "lora"), Row("qwen3-0.6b", 8192, "lora"), Row("llama-3.2-1b", 4096, "full"),
        Row("qwen3-8b", 4096, "lora"), Row("qwen3-14b", 4096, "nf4"), Row("gpt-oss-20b", 4096, "experts", 4),
        Row("qwen3-0.6b", 1024, "lora", unpacked=(2, 4)), Row("qwen3-8b", 1024, "lora", unpacked=(2, 4)),
        Row("qwen3-30b-a3b", 4096, "experts", 4), Row("qwen3-32b", 2048, "nf4"),
        Row("qwen3-8b", 8192, "lora"), Row("qwen3-14b", 4096, "lora"),
        Row("qwen3-8b", 32_768, "lora", whole_files=True), SMALL, Row("small", 512, "lora", unpacked=(2, 4)),
        Row("small", 1024, "lora", whole_files=True), Row("tiny-qwen3", 256, "nf4"), Row("tiny-qwen3", 256, "full"),
        Row("tiny-gpt-oss", 256, "experts"),
    )
} | {
    "gpt-oss-20b experts 4096 whole": Row("gpt-oss-20b", 4096, "experts", 24),
    "qwen3-30b-a3b experts 4096 half": Row("qwen3-30b-a3b", 4096, "experts", 24),
}  # fmt: skip
FIRST = tuple(ROWS)[:6]
TINY = tuple(name for name in ROWS if name.startswith(("small", "tiny")))
"""For a CPU: each kind of row once, to show that it runs."""


def train_side(
    row: Row, name: str, device: str, seed: int, *, shapes: bool = False, **fields: Any
) -> tuple[Any, Watch]:  # fmt: skip
    """Train one side in this process; return its trainer and the watch of its steps.

    Args:
        row: model and data.
        name: of `SIDES`.
        device: ``cpu`` or ``cuda``.
        seed: of weights and order.
        shapes: profile with the shapes of operators' inputs, on a CPU too.
        fields: beside those of the side.
    """
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl import FastSFTConfig, FastSFTTrainer
    from fastpack_trl.bench.baselines import compiled_regions

    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    side = SIDES[name]
    given = material(row, device, seed)
    trainer: Any = None
    watch = Watch(
        lambda: not side.ours or decided(trainer.fastpack_report.to_dict()), device == "cuda" or shapes, shapes
    )
    kinds: tuple[Any, Any] = (FastSFTTrainer, FastSFTConfig) if side.ours else (SFTTrainer, SFTConfig)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        args = kinds[1](
            output_dir=folder, seed=seed, use_cpu=device != "cuda", **COMMON, **row.precision(device), **row.arguments,
            **side.fields, **fields,
        )  # fmt: skip
        trainer = kinds[0](args=args, callbacks=[watch, EndsAfter(MOST)], **given)
        if side.compiled:
            stack.enter_context(compiled_regions(trainer))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return trainer, watch


def measure_side(row: Row, name: str, device: str, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures."""
    return result_of(*train_side(row, name, device, seed), device)


def result_of(trainer: Any, watch: Watch, device: str) -> dict[str, Any]:
    """Return the figures of a run of `train_side`, and the report where the trainer has one."""
    found = figures_of(watch, trainer.state.log_history, device)
    report = getattr(trainer, "fastpack_report", None)
    return found if report is None else {**found, "report": report.to_dict()}


def decided(report: Mapping[str, Any]) -> bool:
    """Return whether no feature of a report still waits for the steps in which it decides."""
    return not any("pending" in str(feature["path"]) for feature in report["features"].values())


def known(rows: Sequence[str], sides: Sequence[str]) -> None:
    """Raise `UserError` for a row or side that does not exist."""
    asked: list[tuple[str, Collection[str]]] = [*((row, ROWS) for row in rows), *((side, SIDES) for side in sides)]
    for name, names in asked:
        if name not in names:
            raise UserError(f"there is no {name!r}{did_you_mean(name, names)} (known: {', '.join(names)})")


def runs(rows: Sequence[str], sides: Sequence[str], rounds: int) -> Iterator[tuple[str, str, int]]:
    """Yield row, side and round: row by row, and the sides backward in every other round."""
    for row in rows:
        for number in range(rounds):
            yield from ((row, side, number) for side in list(sides)[:: 1 if number % 2 == 0 else -1])


def measure(
    rows: Sequence[str], sides: Sequence[str], *, rounds: int, seed: int, seconds: float = math.inf,
    file: ResultFile | None = None, progress: bool = True, unsloth: str = "",
    timeout: float = TIMEOUT, case: str = CASE,
) -> dict[str, Any]:  # fmt: skip
    """Measure sides of rows, each run in a process of its own; a run that fails is an entry with its error.

    Args:
        rows, sides: of `ROWS` and `SIDES`, and `UNSLOTH`.
        rounds: runs of each side.
        seed: of weights and order.
        seconds: for all runs; none begins in less time than the longest so far took.
        file: written after every run; what it has of this very measurement is taken over.
        progress: show a bar, and name failures on stderr.
        unsloth: path of the Python of the side `UNSLOTH`.
        timeout: seconds after which a run is ended; its entry says so.

    Raises:
        UserError: an unknown row or side; no Python, or none that runs, for a side that needs one; `file` holds
            another run.
    """
    known(rows, [side for side in sides if side != UNSLOTH])
    if (UNSLOTH in sides) != bool(unsloth):
        raise UserError(f"{UNSLOTH} has an environment of its own: give --unsloth PYTHON and --sides {UNSLOTH}")
    if unsloth and shutil.which(unsloth) is None:
        raise UserError(f"--unsloth {unsloth!r} is no program: name the Python of an environment with {UNSLOTH}")
    tasks = [
        RowTask(
            {"setting": f"{row}, {side}, round {number}", "row": row, "side": side, "round": number,
             "tokens": ROWS[row].tokens, "layers": layers_of(row)},
            partial(_run, row, side, seed, unsloth, timeout), empty={},
        )
        for row, side, number in runs(rows, sides, rounds)
    ]  # fmt: skip
    settings = {"warmup": WARMUP + SETTLING, "timed": TIMED, "profiled": PROFILED, "longest_warmup": LONGEST_WARMUP}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return run_rows(
        tasks, case=case, settings=settings, apart={}, seconds=seconds, device=device,
        threads=torch.get_num_threads(), seed=seed, file=file, alike=True, progress=progress,
    )  # fmt: skip


def layers_of(row: str) -> str:
    """Return the decoder layers of a row, and those of the public model: ``4 of 24``."""
    shape = shape_of(ROWS[row].model).cut_to(ROWS[row].layers)
    return f"{shape.layers} of {shape.published_layers}"


def _run(row: str, side: str, seed: int, unsloth: str, timeout: float, seconds: float) -> dict[str, Any]:
    if side == UNSLOTH:
        return unsloth_folder.run(ROWS[row], row, seed, unsloth, timeout)
    return answer_of("benchmarks.side_by_side", ("--rows", row, "--sides", side, "--seed", seed, "--here"), timeout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.side_by_side``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(FIRST), help=f"of {', '.join(ROWS)} (default: the first 6)")
    parser.add_argument("--sides", nargs="+", default=list(DEFAULT_SIDES), help=f"of {', '.join(SIDES)}, {UNSLOTH}")
    parser.add_argument("--unsloth", metavar="PYTHON", default="", help=f"of an environment with it, for {UNSLOTH}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all runs; the next command goes on")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="of one run, seconds (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
    parser.add_argument("--again", action="store_true", help="measure anew what FILE has")
    parser.add_argument("--report", metavar="FILE", help="print the table of a record and stop")
    parser.add_argument("--plot", metavar="PNG", help="draw the record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.here:  # in the process of one run
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = measure_side(ROWS[args.rows[0]], args.sides[0], device, args.seed)
        Path(args.json).write_text(json.dumps(found), encoding="utf-8")
        return
    if args.report is not None:
        record = record_of(args.report, CASE)
    else:
        file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
        record = measure(
            args.rows, args.sides, rounds=args.rounds, seed=args.seed, seconds=args.seconds, file=file,
            unsloth=args.unsloth, timeout=args.timeout,
        )  # fmt: skip
        if file is not None:
            file.save(record)
    print(table(record))
    if args.plot is not None:
        from benchmarks.side_plot import figure

        figure(record, Path(args.report or args.json or "").name).savefig(args.plot)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.side_by_side", main))
