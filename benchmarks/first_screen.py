"""The first screen of the README: time and memory of whole runs, one number a row, as one figure and one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.readme_cells import grid, record_of
from benchmarks.side_table import COLOURS, WHOLE_RUN, Cell, believed, cells, graphs_gib, work
from benchmarks.training_side import OURS, SAME_MEMORY
from fastpack_trl.bench.canvas import STYLE, Figure, legend, require_matplotlib
from fastpack_trl.bench.views import device_of

PICTURE = "readme.png"
"""In `pictures.FOLDER`."""
SHOWN = ("stock", "stock compiled", SAME_MEMORY, OURS)
ROWS = (
    "qwen3-0.6b lora 2x4", "qwen3-8b lora 2x4", "qwen3-8b lora 4096", "qwen3-14b nf4 4096", "gpt-oss-20b experts 4096",
    "llama-3.2-1b full 4096", "qwen3-0.6b lora 8192",
)  # fmt: skip
"""In the order of the README: the everyday recipe, then packed rows."""
SHORT = "qwen3-0.6b lora 2048"
"""The row that says what keeps stock from the device."""
STEPS = 100
"""Of a run of `benchmarks.first_step`."""

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """A side of a row: the seconds of all of its steps together (of a token, or of the run), and the GiB it took."""

    seconds: float
    gib: float


@dataclass(frozen=True, slots=True)
class Line:
    """A row: what it trains, the file of its record, and its runs by side, in the order of `SHOWN`."""

    what: str
    file: str
    runs: Mapping[str, Run]

    def times(self, side: str, over: str = "stock") -> float:
        return self.runs[over].seconds / self.runs[side].seconds


def lines(results: Results) -> list[Line]:
    """Return the rows that stock and fastpack have run, each from the newest record that has both."""
    found: dict[str, Line] = {}
    newest = sorted(results.items(), key=lambda item: str(item[1]["date"]))
    for name, record in newest:
        if record["machine"]["device"] == "cuda" and record["case"] in _READ:
            for row, line in _READ[record["case"]](name, record):
                if {"stock", OURS} <= line.runs.keys() and (record["case"] == "side_by_side" or row not in found):
                    found[row] = line
    return [found[row] for row in ROWS if row in found]


def _side_by_side(name: str, record: Mapping[str, Any]) -> Iterator[tuple[str, Line]]:
    for row, sides in cells(record).items():
        stock = sides.get("stock")
        good = {
            side: Run(1 / cell.whole, memory(cell.runs))
            for side in SHOWN
            if (cell := sides.get(side)) and cell.runs and stock and (side == "stock" or believed(row, stock, cell))
        }
        yield row, Line(work(record, row), name, good)


def _first_step(name: str, record: Mapping[str, Any]) -> Iterator[tuple[str, Line]]:
    for row in record["rows"]:
        ran = [run for run in row["runs"] if run["cache"] == "cold" and run["steps"] == STEPS and not run["long"]]
        runs = {run["side"]: Run(run["train_seconds"], memory([run])) for run in ran if "train_seconds" in run}
        yield row["row"], Line(work(record, row["row"]), name, runs)


_READ = {"side_by_side": _side_by_side, "first_step": _first_step}
"""By case, in which a row of the newest ``side_by_side`` comes before one of ``first_step``."""


def memory(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the GiB that runs took: reserved; of older records allocated, and what CUDA graphs held beside it."""
    if all(run.get("reserved_gib") for run in runs):
        return float(max(run["reserved_gib"] for run in runs))
    return max((run["peak_gib"] or 0.0) + graphs_gib(run) for run in runs)


def glance(results: Results) -> str:
    """Return what stands at the top of the README: figure, table, where it is from, and why stock is slow."""
    shown = lines(results)
    if not shown:
        return "Open."
    table = [
        [line.what, f"**{line.times(OURS):.1f}x**",
         f"{line.times(OURS, 'stock compiled'):.1f}x" if "stock compiled" in line.runs else "-",
         *(f"{line.runs[side].gib:.1f} GiB" if side in line.runs else "-" for side in (SHOWN[0], *SHOWN[2:]))]
        for line in shown
    ]  # fmt: skip
    used = list(dict.fromkeys(line.file for line in shown))
    devices = ", ".join(dict.fromkeys(device_of(results[file]) for file in used))
    note = (
        f"{devices}; runs of {WHOLE_RUN} steps reckoned from timed ones, slow first ones too where recorded "
        f"(`first_step_...`: {STEPS} that ran); LoRA of rank 16, "
        "real text, random weights, every side at its defaults in its own process; -: not measured. *stock*: "
        "`trl.SFTTrainer` as installed, which checkpoints; *stock compiled*: its layers compiled by accelerate; "
        "*same memory*: fastpack recomputes as stock does. "
        "Stock lets documents of gpt-oss see each other and so trains on another loss. "
        + "; ".join(record_of(file, results[file]) for file in used)
        + "."
    )
    columns = "training | >over stock | >over stock compiled | >memory: stock | >fastpack (same memory) | >fastpack"
    picture = f"![time and memory beside stock TRL](docs/figures/{PICTURE})"
    return "\n\n".join([picture, *_why(results), grid(columns, table), note])


def _why(results: Results) -> Iterator[str]:
    """Say what stock waits for in a step of few tokens, from the newest record that has profiled it."""
    for record in sorted(results.values(), key=lambda record: str(record["date"]), reverse=True):
        sides = cells(record).get(SHORT, {}) if record["case"] == "side_by_side" else {}
        if all(side in sides and sides[side].runs and sides[side].runs[0]["profile"] for side in ("stock", OURS)):
            (launches, idle), (ours, _) = (_launched(sides[side]) for side in ("stock", OURS))
            yield (
                f"Why stock is slow with small batches: its step launches {launches:,.0f} kernels one by one from "
                f"Python (Qwen3-0.6B LoRA, 2,048 tokens), and the GPU is idle for {idle:.0%} of the time; fastpack's "
                f"takes {ours:,.0f} launches. Little is gained on rows of one document and in runs of a few dozen "
                "steps: [when it does not help](#when-it-does-not-help)."
            )
            return


def _launched(cell: Cell) -> tuple[float, float]:
    run = cell.runs[0]
    return run["profile"]["launches"], max(0.0, 1 - run["profile"]["busy_seconds"] / median(run["step_seconds"]))


_BAR, _HEADING, _TOP, _LOW, _WIDTH = 0.118, 1.25, 0.6, 0.22, 8.4  # inches; the heading in bars


def figure(results: Results) -> Figure | None:
    """Draw the rows of `lines`: on the left time as a share of stock's, on the right memory; None where there is none.

    Raises:
        UserError: matplotlib is missing.
    """
    shown = lines(results)
    if not shown:
        return None
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure as NewFigure

    height = _TOP + _LOW + _BAR * (sum(len(line.runs) for line in shown) + (_HEADING + 0.4) * len(shown))
    with matplotlib.rc_context(STYLE):
        made = NewFigure(figsize=(_WIDTH, height))
        panels = made.subplots(ncols=2, sharey=True, width_ratios=(1.25, 1))
    legends: dict[str, Any] = {}
    at = 0.0
    for line in shown:
        panels[0].text(0, at, line.what, va="center", fontsize=7.8, fontweight="bold")
        at += _HEADING * 0.8
        for side, run in line.runs.items():
            weight = "bold" if side == OURS else "normal"
            time, gib = 1 / line.times(side), run.gib
            words = "" if side == "stock" else f"{line.times(side):.1f}x"
            for axes, value, label in zip(panels, (time, gib), (words, f"{gib:.1f} GiB"), strict=True):
                legends[side] = axes.barh(at, value, 0.86, color=COLOURS[side])
                axes.annotate(label, (value, at), (3, 0), textcoords="offset points", va="center", fontsize=7.2,
                              fontweight=weight)  # fmt: skip
            at += 1
        at += 0.4 + _HEADING * 0.2
    most = max(run.gib for line in shown for run in line.runs.values())
    said = ("time, stock = 1 (shorter is faster)", "peak memory, GiB")
    for axes, room, label in zip(panels, (1.08, most * 1.2), said, strict=True):
        axes.set(ylim=(at - 0.6, -0.8), xlim=(0, room), yticks=[])
        axes.set_title(label, loc="left", fontsize=7.8, pad=3)
        axes.tick_params(labelsize=7.2)
        axes.grid(visible=False, axis="y")
    made.subplots_adjust(0.016, _LOW / height, 0.99, 1 - _TOP / height, wspace=0.04)
    times = [line.times(OURS) for line in shown]
    over = f"{min(times):.1f} to {max(times):.1f} times as fast as stock TRL, all steps of a run together, "
    over += ", ".join(dict.fromkeys(device_of(results[line.file]) for line in shown))
    made.text(0.012, 1 - 0.18 / height, over, fontsize=10.5, fontweight="bold")
    ordered = {side: legends[side] for side in SHOWN if side in legends}
    legend(made, ordered, top=0.26)
    return made
