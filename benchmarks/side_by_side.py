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
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.captured import Row, material, profile_figures
from benchmarks.own_process import answer_of
from benchmarks.row_loop import RowTask, run_rows
from benchmarks.side_table import table
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter
from fastpack_trl.measure.record import check_writable

CASE = "side_by_side"
WARMUP, LONGEST_WARMUP, TIMED, PROFILED = 6, 48, 12, 2
LOGGED = 6
"""Steps between two logs; the others are multiples of it, so that tokens and losses are those of the timed steps."""
TIMEOUT = 400
OURS = "fastpack"


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
}
DEFAULT_SIDES = ("stock", "stock compiled", OURS)
SMALL = Row("small", 512, "lora")
ROWS = {
    row.name: row
    for row in (
        Row("qwen3-0.6b", 2048, "lora"), Row("qwen3-0.6b", 8192, "lora"), Row("llama-3.2-1b", 4096, "full"),
        Row("qwen3-8b", 4096, "lora"), Row("qwen3-14b", 4096, "nf4"), Row("gpt-oss-20b", 4096, "experts", 4),
        Row("qwen3-0.6b", 1024, "lora", unpacked=(2, 4)), Row("qwen3-8b", 1024, "lora", unpacked=(2, 4)),
        Row("qwen3-30b-a3b", 4096, "experts", 4), Row("qwen3-32b", 2048, "nf4"), SMALL,
        Row("small", 512, "lora", unpacked=(2, 4)),
    )
}  # fmt: skip
FIRST = tuple(ROWS)[:6]


class Watch(TrainerCallback):
    """Times the steps after the warm-up, then profiles some, and ends the run.

    Args:
        ready: returns whether all that pays back in a long run is decided; the warm-up lasts until then.
        profile: whether to profile.
    """

    def __init__(self, ready: Callable[[], bool], profile: bool) -> None:
        self.seconds: list[float] = []
        self.first_step = 0.0
        self.warmup = 0
        self.profile: dict[str, float] = {}
        self._ready, self._profiles = ready, profile
        self._profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
        self._last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == 1:
            self.first_step = now - self._last
        if not self.warmup:
            if step % LOGGED == 0 and step >= WARMUP and (self._ready() or step >= LONGEST_WARMUP):
                self.warmup = step
        elif len(self.seconds) < TIMED:
            self.seconds.append(now - self._last)
        if self.warmup and step == self.warmup + TIMED:
            if not self._profiles:
                control.should_training_stop = True
            else:
                self._profiler.start()
        if step == self.warmup + TIMED + PROFILED and self._profiles:
            self._profiler.stop()
            self.profile = profile_figures(self._profiler.events() or (), PROFILED)
            control.should_training_stop = True
        self._last = time.perf_counter()


def measure_side(row: Row, name: str, device: str, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures."""
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl import FastSFTConfig, FastSFTTrainer
    from fastpack_trl.bench.baselines import compiled_regions

    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    side = SIDES[name]
    given = material(row, device, seed)
    trainer: Any = None
    watch = Watch(lambda: not side.ours or decided(trainer.fastpack_report.to_dict()), profile=device == "cuda")
    kinds: tuple[Any, Any] = (FastSFTTrainer, FastSFTConfig) if side.ours else (SFTTrainer, SFTConfig)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        args = kinds[1](
            output_dir=folder, max_steps=LONG_RUN, learning_rate=1e-4, logging_steps=LOGGED, save_strategy="no",
            report_to="none", seed=seed, disable_tqdm=True, use_cpu=device != "cuda", **row.precision(device),
            **row.arguments, **side.fields,
        )  # fmt: skip
        most = LONGEST_WARMUP + TIMED + PROFILED + 1
        trainer = kinds[0](args=args, callbacks=[watch, EndsAfter(most)], **given)
        if side.compiled:
            stack.enter_context(compiled_regions(trainer))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    first, last = logs[watch.warmup], logs[watch.warmup + TIMED]
    found = {
        "step_seconds": watch.seconds, "timed_tokens": last["num_tokens"] - first["num_tokens"],
        "warmup_steps": watch.warmup, "first_step_seconds": watch.first_step, "profile": watch.profile,
        "losses": {str(step): entry["loss"] for step, entry in logs.items()},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }  # fmt: skip
    return found | ({"report": trainer.fastpack_report.to_dict()} if side.ours else {})


def decided(report: Mapping[str, Any]) -> bool:
    """Return whether no feature of a report still waits for the steps in which it decides."""
    return not any("pending" in str(feature["path"]) for feature in report["features"].values())


def runs(rows: Sequence[str], sides: Sequence[str], rounds: int) -> Iterator[tuple[str, str, int]]:
    """Yield row, side and round: row by row, and the sides backward in every other round."""
    for row in rows:
        for number in range(rounds):
            yield from ((row, side, number) for side in list(sides)[:: 1 if number % 2 == 0 else -1])


def measure(
    rows: Sequence[str], sides: Sequence[str], *, rounds: int, seed: int, seconds: float = math.inf,
    file: ResultFile | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Measure sides of rows, each run in a process of its own; a run that fails is an entry with its error.

    Raises:
        UserError: an unknown row or side; `file` holds another run.
    """
    asked: list[tuple[str, Collection[str]]] = [*((row, ROWS) for row in rows), *((side, SIDES) for side in sides)]
    for name, known in asked:
        if name not in known:
            raise UserError(f"there is no {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    tasks = [
        RowTask(
            {"setting": f"{row}, {side}, round {number}", "row": row, "side": side, "round": number,
             "tokens": ROWS[row].tokens},
            partial(_run, row, side, seed), empty={},
        )
        for row, side, number in runs(rows, sides, rounds)
    ]  # fmt: skip
    settings = {"warmup": WARMUP, "timed": TIMED, "profiled": PROFILED, "longest_warmup": LONGEST_WARMUP}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return run_rows(
        tasks, case=CASE, settings=settings, apart={}, seconds=seconds, device=device,
        threads=torch.get_num_threads(), seed=seed, file=file, alike=True, progress=progress,
    )  # fmt: skip


def _run(row: str, side: str, seed: int, seconds: float) -> dict[str, Any]:
    return answer_of("benchmarks.side_by_side", ("--rows", row, "--sides", side, "--seed", seed, "--here"), TIMEOUT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.side_by_side``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(FIRST), help=f"of {', '.join(ROWS)} (default: the first 6)")
    parser.add_argument("--sides", nargs="+", default=list(DEFAULT_SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all runs; the next command goes on")
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
        record = json.loads(Path(args.report).read_text(encoding="utf-8"))
    else:
        file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
        record = measure(
            args.rows, args.sides, rounds=args.rounds, seed=args.seed, seconds=args.seconds, file=file
        )  # fmt: skip
        if file is not None:
            file.save(record)
    print(table(record))
    if args.plot is not None:
        from benchmarks.side_plot import figure

        figure(record, Path(args.report or args.json or "").name).savefig(args.plot)


if __name__ == "__main__":
    main()
