"""Seconds from ``train()`` to the end of its first step, and of runs of 20, 100 and 500 steps: one process per run.

The sides are stock and ours at its defaults. Ours compiles where the steps that are left pay for it, so each length is
a run of its own, and so are the first steps of a long run, in which everything is on. Inductor's and Triton's caches
are empty (``cold``) or as the cold long run left them (``warm``). Stock compiles nothing: its shorter runs are the
first steps of the longest, which ends after 100: what a longer one takes is the last step's time, as often as it has
steps more, and drawn hollow.
"""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import CaseCommand
from benchmarks.side_table import COLOURS
from benchmarks.training_rows import ROWS, SMALL
from benchmarks.training_side import OURS, SIDES, train_side
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.training_run import OwnProcess
from fastpack_trl.bench.views import device_of
from fastpack_trl.measure.payback import LONG_RUN

CASE = "first_step"
DEFAULT_ROWS = ("qwen3-0.6b lora 2048", "gpt-oss-20b experts 4096")
STEPS = (20, 100, 500)
LOGGED = 10
LONG = 100
"""Steps that are run of a long run, and of stock's; seconds a step are those of the second half of a run."""
TIMEOUT = 400


@dataclass(frozen=True, slots=True)
class Length:
    """Steps of a run: all of it, or the first of a long one."""

    steps: tuple[int, ...]
    """Those at whose ends the seconds are noted; the last one ends the run."""
    long: bool = False


def measure_run(row: Mapping[str, Any], side: str, *, steps: Sequence[int], long: bool, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its seconds by step, a step's, and those of all `train`."""
    last = max(steps)
    marks = sorted({1, 2, max(1, last // 2), *steps} & {*range(last + 1)})  # layers are compiled in the second
    watched = {"warmup": 1, "longest_warmup": 1, "timed": last - 1, "span": last, "marks": marks}
    began: list[float] = []
    trainer, watch = train_side(
        ROWS[row["row"]], SIDES[side], seed, watched, made=lambda _: began.append(time.perf_counter()),
        logging_steps=LOGGED, max_steps=LONG_RUN if long else last,
    )  # fmt: skip
    total = time.perf_counter() - began[0]
    figures = watch.figures(trainer)
    return {
        "seconds": watch.marks, "train_seconds": total, "losses": list(figures.pop("losses").values()),
        "step_seconds": (watch.marks[last] - watch.marks.get(last // 2, 0.0)) / (last - last // 2),
        **{name: figures[name] for name in ("peak_gib", "reserved_gib", "report") if name in figures},
    }  # fmt: skip


def runs(steps: Sequence[int]) -> Iterator[tuple[str, str, Length]]:
    """Yield side, cache and length of each run; the ``warm`` one after the cold run that filled its cache."""
    yield "stock", "cold", Length(tuple(sorted({min(count, LONG) for count in steps})))
    yield OURS, "cold", Length((LONG,), long=True)
    yield OURS, "warm", Length((LONG,), long=True)
    for count in sorted(steps):
        if count <= LONG:
            yield OURS, "cold", Length((count,))


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows; each of their runs has a process of its own."""

    def run(name: str, seconds: float) -> dict[str, Any]:
        return {"runs": list(_runs(name, args.steps, args.seed))}

    return [RowTask({"row": name}, partial(run, name), empty={"runs": []}) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return the lengths of the runs."""
    return {"steps": args.steps, "long": LONG, "logging_steps": LOGGED, "small": SMALL.name}


def _runs(row: str, steps: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as filled:
        for number, (side, cache, length) in enumerate(runs(steps)):
            folder = Path(filled, "filled" if length.long or cache == "warm" else str(number))
            caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
            options = {**asdict(length), "seed": seed}
            here = OwnProcess("benchmarks.first_step:measure_run", options, timeout=TIMEOUT, environment=caches)
            run = {"side": side, "cache": cache, "steps": max(length.steps), "long": length.long}
            yield run | here({"row": row}, side)


_HEIGHT = 3.8  # inches
TITLES = {
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA,\nnot packed",
    "qwen3-8b lora 2x4": "Qwen3-8B LoRA,\nnot packed",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 layers),\nLoRA on experts",
}
"""By row; others are called as on the command line."""
_LINES = {
    ("stock", "cold"): ("stock", COLOURS["stock"], "-", "o"),
    ("fastpack", "cold"): ("fastpack, empty caches", COLOURS["fastpack"], "-", "s"),
    ("fastpack", "warm"): ("fastpack, filled caches", COLOURS["fastpack"], "--", "D"),
}
"""Label, colour, line and marker of a side and cache."""


@dataclass(frozen=True, slots=True)
class WallTimes:
    """Seconds from ``train()`` to the end of a step, of one side and cache."""

    side: str
    cache: str
    measured: dict[int, float]
    """By steps. Stock's are all of one run; ours of one for each length, the first step of the longest."""
    beyond: dict[int, float]
    """Of longer runs: those of the longest measured one and, for each step more, the time of its last ones."""


def wall_times(runs: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Iterator[WallTimes]:
    """Yield the times of each side and cache, with those of runs of `steps` steps that are longer than any measured."""
    for side, cache in _LINES:
        ran = [run for run in runs if (run["side"], run["cache"]) == (side, cache) and "seconds" in run]
        if not ran:
            continue
        longest = max(ran, key=lambda run: (run["long"], run["steps"]))
        of_it = {int(step): seconds for step, seconds in longest["seconds"].items()}
        lengths = {run["steps"]: run["seconds"][str(run["steps"])] for run in ran if not run["long"]}
        last = longest["steps"]
        measured = of_it if side == "stock" else {1: of_it[1]} | (lengths or {last: of_it[last]})
        beyond = {
            count: of_it[last] + (count - last) * longest["step_seconds"] for count in sorted(steps) if count > last
        }
        yield WallTimes(side, cache, dict(sorted(measured.items())), beyond)


def figure(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw a panel for each row of the record.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = record["rows"]
    made, panels = new_figure(record, _HEIGHT, source, ncols=len(rows), squeeze=False)
    shown: dict[str, Any] = {}
    for axes, row in zip(panels[0], rows, strict=True):
        for times in wall_times(row["runs"], record["settings"]["steps"]):
            label, colour, line, marker = _LINES[times.side, times.cache]
            points = (times.measured | times.beyond).items()
            (shown[label],) = axes.plot(*zip(*points, strict=True), line, color=colour)
            for these, fill in ((times.measured, colour), (times.beyond, "white")):
                axes.scatter(these.keys(), these.values(), 16, fill, marker, edgecolors=colour, zorder=3)
        axes.set_title(TITLES.get(row["row"], row["row"]), fontsize=8)
        axes.set(xlabel="optimizer steps", ylim=(0, None))
    panels[0][0].set_ylabel("seconds")
    legend(made, shown)
    return headed(
        made,
        f"Time from train() to the end of a step, {device_of(record)}",
        "First steps with all that is made in them; hollow marks are not run, but reckoned from the last steps",
    )


def table(record: Mapping[str, Any]) -> str:
    """Return a line per run, and the rows that were not begun."""
    lines = [_line(row["row"], run) for row in record["rows"] for run in row["runs"]]
    return "\n".join([*lines, *(f"{row['row']:24} {row['skipped']}" for row in record["rows"] if row.get("skipped"))])


def _line(row: str, run: Mapping[str, Any]) -> str:
    head = f"{row:24} {run['side']:8} {run['cache']:4} {run['steps']:4} steps{' of many' if run['long'] else ''}"
    if "failed" in run:
        return f"{head}  failed: {run['failed']}"
    seconds = ", ".join(f"{taken:.1f} s to step {step}" for step, taken in run["seconds"].items())
    seconds += f"; {run['step_seconds'] * 1e3:.0f} ms a step; train() {run['train_seconds']:.1f} s"
    report = run.get("report")
    if report is None:
        return f"{head}  {seconds}"
    return f"{head}  {seconds}; {report['features']['layer_compile']['reason']}"


def add_options(parser: ArgumentParser) -> None:
    """Add the option that other cases do not have."""
    parser.add_argument(
        "--steps", type=int, nargs="+", default=list(STEPS), help="lengths of runs (default: %(default)s)"
    )


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=DEFAULT_ROWS, tasks=tasks, settings=settings,
    table=table, figure=figure, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
