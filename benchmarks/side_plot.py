"""The picture of a record of `benchmarks.side_by_side`: tokens per second of each side, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.side_table import Cell, believed, cells, work
from benchmarks.training_rows import ROWS
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure, room_for_labels
from fastpack_trl.bench.views import device_of

COLOURS = {
    "stock": "#999999", "stock compiled": "#56B4E9", "stock + Liger": "#CC79A7", "fastpack (same memory)": "#E69F00",
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
            label = f"{times:.1f}x   {cell.rate:,.0f} tokens/s" if good else _reason(cell)
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
        made, f"{beside}, {device_of(record)}", "Tokens per second of whole training steps, padding not counted"
    )


def _place(row: str) -> int:
    """Return where a row stands in the table of rows."""
    return list(ROWS).index(row) if row in ROWS else len(ROWS)


def _reason(cell: Cell) -> str:
    """Return why a side has no bar, in a few words: the name of its error; the table has all of it."""
    return f"failed: {cell.failed.partition(':')[0][:_SHOWN]}" if cell.failed else "losses differ"
