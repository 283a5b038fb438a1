"""The table of a record of `benchmarks.side_by_side`: tokens per second by row and side, and what is behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.readme_cells import grid
from benchmarks.training_rows import ROWS
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure, room_for_labels
from fastpack_trl.bench.views import device_of

LOSS_BUDGET = 1e-3
"""Relative, of a logged loss of a dense model in bf16; beyond it a time is not believed."""
COMPARED = 24
"""Steps whose losses are compared: in bf16 two runs drift apart later, two of the same side too."""
ORDER = (
    "stock", "stock compiled", "stock compiled, all kept", "stock + Liger", "unsloth",
    "fastpack (same memory)", "fastpack",
)  # fmt: skip
WHOLE_RUN = 500
"""Steps of the run that a side is the beginning of."""
LEAKS = ("gpt-oss",)
"""Models whose packed documents see each other under stock: their losses differ."""
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B", "llama-3.2-1b": "Llama-3.2-1B", "qwen3-8b": "Qwen3-8B", "qwen3-14b": "Qwen3-14B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-32b": "Qwen3-32B", "small": "small Qwen3",
}  # fmt: skip
KINDS = {"lora": "LoRA", "nf4": "QLoRA", "full": "full fine-tuning", "experts": "LoRA on experts"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One side of one row: all its runs together."""

    runs: Sequence[Mapping[str, Any]]
    failed: str = ""

    @property
    def rates(self) -> list[float]:
        """Return tokens per second of each timed step, at the mean tokens of its run's steps."""
        return [
            run["timed_tokens"] / len(run["step_seconds"]) / seconds
            for run in self.runs
            for seconds in run["step_seconds"]
        ]

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = quantiles(self.rates, n=4)
        return low, high

    @property
    def whole(self) -> float:
        """Return tokens per second of whole runs of `WHOLE_RUN` steps, from ``train()`` on.

        Of records without the seconds of the first steps: of all timed steps together, slow ones too.
        """
        tokens, seconds = (sum(each) for each in zip(*map(_whole_run, self.runs), strict=True))
        return float(tokens / seconds)


def _whole_run(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the tokens and seconds of a run, its steps after the measured ones taken for the mean of the timed."""
    timed, seconds = len(run["step_seconds"]), sum(run["step_seconds"])
    if "warmup_seconds" not in run:
        return run["timed_tokens"], seconds
    left = WHOLE_RUN - run["warmup_steps"]
    return WHOLE_RUN * run["timed_tokens"] / timed, run["warmup_seconds"] + left * seconds / timed


def peak_cell(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the GiB that a card must have for some runs.

    Older records have what was allocated, and after a plus what CUDA graphs held beside it: ``42.0 + 19.9``.
    """
    if all("reserved_gib" in run for run in runs):
        reserved = max((run["reserved_gib"] for run in runs if run["reserved_gib"] is not None), default=None)
        return "-" if reserved is None else f"{reserved:.1f}"
    peak = max((run["peak_gib"] for run in runs if run["peak_gib"] is not None), default=None)
    graphs = max(map(graphs_gib, runs), default=0.0)
    return "-" if peak is None else f"{peak:.1f}{f' + {graphs:.1f}' if graphs else ''}"


def graphs_gib(run: Mapping[str, Any]) -> float:
    """Return the GiB of CUDA graphs, which torch's count of allocations lacks; a record has them in its report only."""
    graphs = ((run.get("report") or {}).get("features") or {}).get("cuda_graph") or {}
    found = re.search(r"graphs? of ([\d.]+) GiB", str(graphs.get("reason")))
    return float(found[1]) if found and graphs["status"] == "on" else 0.0


def cells(record: Mapping[str, Any]) -> dict[str, dict[str, Cell]]:
    """Return the sides of each row, rows in the order of the record and sides in `ORDER`."""
    grouped: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in record["rows"]:
        grouped.setdefault(run["row"], {}).setdefault(run["side"], []).append(run)
    out: dict[str, dict[str, Cell]] = {}
    for row, sides in grouped.items():
        for side, entries in sides.items():
            good = [run for run in entries if "step_seconds" in run]
            bad = [str(run.get("failed") or run.get("skipped")) for run in entries if "step_seconds" not in run]
            out.setdefault(row, {})[side] = Cell(good, bad[0].splitlines()[-1] if bad and not good else "")
    place = {side: number for number, side in enumerate(ORDER)}
    return {row: dict(sorted(sides.items(), key=lambda side: place.get(side[0], -1))) for row, sides in out.items()}


def loss_difference(stock: Cell, other: Cell) -> float | None:
    """Return the largest relative difference of a loss of the same step, of the first; None where none is common."""
    theirs, mine = (cell.runs[0]["losses"] if cell.runs else {} for cell in (stock, other))
    common = [step for step in theirs.keys() & mine.keys() if int(step) <= COMPARED]
    apart = [abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in common]
    return max(apart, default=None)


def believed(row: str, stock: Cell, other: Cell) -> bool:
    """Return whether the losses of a side are stock's, or may differ since stock's documents see each other."""
    apart = loss_difference(stock, other)
    return row.startswith(LEAKS) or (apart is not None and apart <= LOSS_BUDGET)


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row and side."""
    columns = "row | side | >tokens/s | >quartiles | >whole run | >over stock | >over compiled | >loss from stock's"
    said = (
        f"*tokens/s*: of the median of the timed steps; *whole run*: of {WHOLE_RUN} steps from `train()` on, its first "
        "ones measured and the others taken for the mean of the timed; without the seconds of the first, of all timed "
        "steps together. *peak*: what the card must have, or of older records the most that tensors took at a "
        "time, + what CUDA graphs held beside it."
    )
    rows = [
        [title(record, row), side, *_cells(row, sides, cell)]
        for row, sides in cells(record).items()
        for side, cell in sides.items()
    ]
    lines = [f"**Side by side, {device_of(record)}.** {said}", ""]
    lines.append(grid(f"{columns} | >peak, GiB | >kernels, ms | >idle | >launches", rows))
    if any(run["row"].startswith(LEAKS) for run in record["rows"]):
        said = "Stock lets packed documents of gpt-oss see each other: its losses are those of another computation."
        lines += ["", said]
    return "\n".join(lines)


def title(record: Mapping[str, Any], row: str) -> str:
    """Return the name of a row, with its layers where it has not all of the public model."""
    layers = layers_of(record, row)
    some, _, all_of_them = layers.partition(" of ")
    return row if some == all_of_them else f"{row} ({layers} layers)"


def work(record: Mapping[str, Any], row: str) -> str:
    """Return what a row trains in words: ``Qwen3-8B LoRA, rows of 4,096 tokens``."""
    model, kind, size, *_ = row.split()
    some, _, all_of_them = layers_of(record, row).partition(" of ")
    cut = "" if some == all_of_them else f" ({some} of its layers)"
    documents, _, micro_batches = size.partition("x")
    rows = f"not packed, batch size {documents}, {micro_batches} accumulated" if micro_batches else ""
    rows = rows or f"rows of {int(size):,} tokens"
    return f"{MODELS.get(model, model)}{cut} {KINDS.get(kind, kind)}, {rows}"


def layers_of(record: Mapping[str, Any], row: str) -> str:
    """Return the decoder layers of a row and those of the public model, ``4 of 24``; empty where they are unknown."""
    return next((str(run["layers"]) for run in record["rows"] if run["row"] == row and "layers" in run), "")


def times(row: str, sides: Mapping[str, Cell], over: str, cell: Cell) -> float | None:
    """Return how many times the tokens per second of the side `over` a side has; None where there is no such figure.

    There is none for a side beside itself, where one of them did not run, or where the losses are not stock's.
    """
    stock, other = sides.get("stock"), sides.get(over)
    if stock is None or other is None or cell is other or not (stock.runs and other.runs and cell.runs):
        return None
    good = all(one is stock or believed(row, stock, one) for one in (other, cell))
    return cell.rate / other.rate if good else None


def slower(record: Mapping[str, Any]) -> list[str]:
    """Return lines for the table of what does not help: sides of ours below stock, or below stock compiled."""
    lines: list[str] = []
    for row, sides in cells(record).items() if record["case"] == "side_by_side" else ():
        for side, cell in sides.items():
            for other in ("stock", "stock compiled"):
                ratio = times(row, sides, other, cell) if side.startswith("fastpack") else None
                if ratio is not None and ratio < 1:
                    where = f"{title(record, row)}, {device_of(record)}"
                    lines.append(f"| {where} | {other} | {side} | {ratio:.2f} | slower |")
    return lines


def _cells(row: str, sides: Mapping[str, Cell], cell: Cell) -> list[str]:
    if not cell.runs:
        return [cell.failed or "-", *["-"] * 9]
    low, high = cell.quartiles
    stock = sides.get("stock")
    apart = None if stock is None or not stock.runs else loss_difference(stock, cell)
    differs = stock is not None and stock.runs and cell is not stock and not believed(row, stock, cell)
    over = [times(row, sides, other, cell) for other in ("stock", "stock compiled")]
    profile, step = cell.runs[0]["profile"], median(cell.runs[0]["step_seconds"])
    return [
        f"{cell.rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{cell.whole:,.0f}",
        *("losses differ" if differs else "-" if ratio is None else f"{ratio:.2f}" for ratio in over),
        "-" if apart is None else f"{apart:.1e}",
        peak_cell(cell.runs),
        f"{1000 * profile['busy_seconds']:,.0f}" if profile else "-",
        f"{max(0.0, 1 - profile['busy_seconds'] / step):.0%}" if profile else "-",
        f"{profile['launches']:,.0f}" if profile else "-",
    ]  # fmt: skip


COLOURS = {
    "stock": "#999999", "stock compiled": "#56B4E9", "stock compiled, all kept": "#F0E442",
    "stock + Liger": "#CC79A7", "fastpack (same memory)": "#E69F00",
    "fastpack": "#D55E00", "fastpack, base in FP8": "#0072B2", "unsloth": "#009E73",
}  # fmt: skip
"""By side; told apart by people who see no red or no green, and in grey by the order of the bars."""
_BAR, _TOP, _BOTTOM = 0.22, 0.95, 0.75  # inches; of one bar, of what stands above them and below
_HEADING = 1.1  # bars
_SHOWN = 40  # characters of an error


def figure(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw a group of bars for each row: how many times stock each side is, its tokens per second beside the bar.

    Raises:
        UserError: matplotlib is missing.
    """
    found = {row: sides for row, sides in cells(record).items() if "stock" in sides and sides["stock"].runs}
    groups = {row: found[row] for row in sorted(found, key=_place)}
    bars = sum(len(sides) for sides in groups.values()) + (_HEADING + 0.3) * len(groups)
    made, axes = new_figure(record, _TOP + _BAR * bars + _BOTTOM, source)
    at, longest, ours = 0.0, 1.0, []
    shown: dict[str, Any] = {}
    for row, sides in groups.items():
        axes.text(0, at, f" {work(record, row)}", va="center", fontsize=8.5, fontweight="bold")
        at += _HEADING * 0.85
        for side, cell in sides.items():
            good = bool(cell.runs) and (side == "stock" or believed(row, sides["stock"], cell))
            times = cell.rate / sides["stock"].rate if good else 0.0
            label = f"{times:.1f}x   {cell.rate:,.0f} tokens/s" if good else f"{side}: {_reason(cell)}"
            shown[side] = axes.barh(at, times, 0.85, color=COLOURS[side])
            text = axes.annotate(label, (times, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})  # over a line of the grid
            longest, at = max(longest, times), at + 1
            ours += [times] if good and side == "fastpack" else []
        at += 0.3 + _HEADING * 0.15
    axes.set(ylim=(at - 0.4, -0.7), xlabel="times the tokens per second of stock")
    axes.set_yticks([])
    room_for_labels(axes, [longest], 0.3)
    span = "" if not ours else f"{min(ours):.1f}" + (f" to {max(ours):.1f}" if len(ours) > 1 else "")
    beside = f"fastpack trains at {span} times the speed of stock TRL" if ours else "Training beside stock TRL"
    legend(made, shown)
    return headed(
        made,
        f"{beside}, {device_of(record)}",
        "Tokens per second of the median step after the warm-up, padding not counted",
    )


def _place(row: str) -> int:
    """Return where a row stands in the table of rows."""
    return list(ROWS).index(row) if row in ROWS else len(ROWS)


def _reason(cell: Cell) -> str:
    """Return why a side has no bar, in a few words: the name of its error; the table has all of it."""
    return cell.failed.partition(":")[0][:_SHOWN] or "losses differ"
