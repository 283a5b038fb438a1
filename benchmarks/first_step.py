"""Seconds from ``train()`` to the end of its first step, and of runs of 20, 100 and 500 steps: one process per run.

The sides are stock and ours at its defaults. Ours compiles where the steps that are left pay for it, so each length is
a run of its own, and so are the first steps of a long run, in which everything is on. Inductor's and Triton's caches
are empty (``cold``) or as the cold long run left them (``warm``). Stock compiles nothing: its shorter runs are the
first steps of the longest, which ends after 100: what a longer one takes is the last step's time, as often as it has
steps more, and drawn hollow. Rows named ``nf4-fp16`` train in fp16 on a device that says it is a T4: they show what is
chosen there, not how fast one is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.captured import ROWS, SMALL, Row, as_on_a_t4, material, scalable
from benchmarks.one_line import in_one_line, record_of
from benchmarks.own_process import answer_of
from benchmarks.side_watch import peaks_gib
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter
from fastpack_trl.measure.record import make_record, write_json

DEFAULT_ROWS = ("qwen3-0.6b lora 2048", "gpt-oss-20b experts 4096")
STEPS = (20, 100, 500)
LONG = 100
"""Steps that are run of a long run, and of stock's; seconds a step are those of the second half of a run."""
TIMEOUT = 400


@dataclass(frozen=True, slots=True)
class Length:
    """Steps of a run: all of it, or the first of a long one."""

    steps: tuple[int, ...]
    """Those at whose ends the seconds are noted; the last one ends the run."""
    long: bool = False


class Watch(TrainerCallback):
    """Notes the seconds from `begin` to the end of some steps, at which the device has finished."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = {1, 2, max(steps) // 2, *steps}  # layers are compiled in the second
        self.seconds: dict[int, float] = {}
        self.begin = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self._steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[state.global_step] = time.perf_counter() - self.begin


def measure_run(row: Row, side: str, length: Length, device: str, seed: int) -> dict[str, Any]:
    """Train one side for `length` in this process; return its seconds by step, a step's, and those of all `train`."""
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl import FastSFTTrainer

    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    last = max(length.steps)
    watch = Watch(length.steps)
    given = material(row, device, seed)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, max_steps=LONG_RUN if length.long else last, learning_rate=1e-4, logging_steps=10,
            save_strategy="no", report_to="none", seed=seed, disable_tqdm=True, use_cpu=device != "cuda",
            **row.precision(device), **row.arguments,
        )  # fmt: skip
        callbacks = [watch, EndsAfter(last)]
        with as_on_a_t4(row):
            trainer = (SFTTrainer if side == "stock" else FastSFTTrainer)(args=args, callbacks=callbacks, **given)
            watch.begin = time.perf_counter()
            scalable(trainer).train()
            total = time.perf_counter() - watch.begin
    found: dict[str, Any] = {
        "seconds": watch.seconds, "train_seconds": total, "losses": _losses(trainer),
        "step_seconds": (watch.seconds[last] - watch.seconds.get(last // 2, 0.0)) / (last - last // 2),
        **peaks_gib(device),
    }  # fmt: skip
    if isinstance(trainer, FastSFTTrainer):
        found |= {"start_up": dict(trainer.fastpack_run.step.seconds), "report": trainer.fastpack_report.to_dict()}
    return found


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def runs(steps: Sequence[int]) -> Iterator[tuple[str, str, Length]]:
    """Yield side, cache and length of each run; the ``warm`` one after the cold run that filled its cache."""
    yield "stock", "cold", Length(tuple(sorted({min(count, LONG) for count in steps})))
    yield "fastpack", "cold", Length((LONG,), long=True)
    yield "fastpack", "warm", Length((LONG,), long=True)
    for count in sorted(steps):
        if count <= LONG:
            yield "fastpack", "cold", Length((count,))


def measure(
    rows: Sequence[str], *, steps: Sequence[int], seed: int, progress: bool = True,
    note: Callable[[list[dict[str, Any]]], object] = lambda rows: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure rows by name, each run in a process of its own; `note` gets what there is after each of them.

    Raises:
        UserError: a row that does not exist.
    """
    out = []
    for name in rows:
        if name not in ROWS:
            raise UserError(f"there is no row {name!r}{did_you_mean(name, ROWS)} (rows: {', '.join(ROWS)})")
        found: list[dict[str, Any]] = []
        out.append({"row": name, "runs": found})
        with tempfile.TemporaryDirectory() as filled:
            for number, (side, cache, length) in enumerate(runs(steps)):
                folder = Path(filled, "filled" if length.long or cache == "warm" else str(number))
                found.append({"side": side, "cache": cache, "steps": max(length.steps), "long": length.long})
                found[-1] |= _in_a_process(name, side, length, seed, folder)
                if progress:
                    print(_line(name, found[-1]), flush=True)
                note(out)
    return out


def _in_a_process(row: str, side: str, length: Length, seed: int, cache: Path) -> dict[str, Any]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    arguments = [row, "--side", side, "--seed", seed, "--steps", *length.steps, *(["--long"] if length.long else [])]
    return answer_of("benchmarks.first_step", arguments, TIMEOUT, caches)


def _line(row: str, run: dict[str, Any]) -> str:
    head = f"{row:24} {run['side']:8} {run['cache']:4} {run['steps']:4} steps{' of many' if run['long'] else ''}"
    if "failed" in run:
        return f"{head}  failed: {run['failed']}"
    seconds = ", ".join(f"{taken:.1f} s to step {step}" for step, taken in run["seconds"].items())
    seconds += f"; {run['step_seconds'] * 1e3:.0f} ms a step"
    report = run.get("report")
    if report is None:
        return f"{head}  {seconds}; train() {run['train_seconds']:.1f} s"
    said = [report["facts"].get("first step"), report["features"]["layer_compile"]["reason"]]
    return f"{head}  {seconds}; train() {run['train_seconds']:.1f} s; first step {'; '.join(map(str, said))}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.first_step``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)} (default: {', '.join(DEFAULT_ROWS)})")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=list(STEPS), help="lengths of runs (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--plot", metavar="PNG", help="draw the record, or with --from another one")
    parser.add_argument("--from", dest="record", metavar="FILE", help="measure nothing: a record to be drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.side is not None:  # in the process of one run
        length = Length(tuple(args.steps), args.long)
        found = measure_run(ROWS[args.rows[0]], args.side, length, device, args.seed)
        Path(args.json).write_text(json.dumps(found), encoding="utf-8")
        return

    if args.record is not None:
        _draw(record_of(args.record, "first_step"), args.plot, Path(args.record).name)
        return

    def note(rows: list[dict[str, Any]], complete: bool = False) -> dict[str, Any]:
        """Write what there is: a run that is cut off leaves it."""
        record = make_record(
            case="first_step", settings=settings, rows=rows, complete=complete, device=device,
            threads=torch.get_num_threads(), seed=args.seed,
        )  # fmt: skip
        if args.json is not None:
            write_json(Path(args.json), record)
        return record

    settings = {"steps": args.steps, "long": LONG, "logging_steps": 10, "small": SMALL.name}
    record = note(measure(args.rows or DEFAULT_ROWS, steps=args.steps, seed=args.seed, note=note), complete=True)
    _draw(json.loads(json.dumps(record)), args.plot, "" if args.json is None else Path(args.json).name)


def _draw(record: dict[str, Any], file: str | None, source: str) -> None:
    if file is not None:
        from benchmarks.first_step_plot import figure

        figure(record, source).savefig(file)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.first_step", main))
