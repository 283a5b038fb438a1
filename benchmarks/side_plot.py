"""The picture of a record of `benchmarks.side_by_side`: tokens per second of each side, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.side_table import Cell, believed, cells, work
from fastpack_trl.bench.canvas import DPI, STYLE, Figure, require_matplotlib
from fastpack_trl.bench.views import device_of

COLOURS = {
    "stock": "#999999", "stock compiled": "#56B4E9", "stock + Liger": "#CC79A7", "fastpack (same memory)": "#E69F00",
    "fastpack": "#D55E00", "fastpack, base in FP8": "#0072B2", "unsloth": "#009E73",
}  # fmt: skip
"""By side; told apart by people who see no red or no green, and in grey by the order of the bars."""
_WIDTH, _HEIGHT = 7.0, 0.26  # inches; of the picture, and of one bar
_SHOWN = 40  # characters of an error


def figure(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw a group of bars for each row: how many times stock each side is, its tokens per second beside the bar.

    Raises:
        UserError: matplotlib is missing.
    """
    matplotlib = require_matplotlib()
    groups = {row: sides for row, sides in cells(record).items() if "stock" in sides and sides["stock"].runs}
    bars = sum(len(sides) for sides in groups.values())
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure as New

        made = New(figsize=(_WIDTH, 1.6 + _HEIGHT * (bars + len(groups))), dpi=DPI, layout="constrained")
        axes = made.subplots()
        at, ticks, longest = 0.0, [], 1.0
        named: set[str] = set()
        for row, sides in groups.items():
            begin = at
            for side, cell in sides.items():
                good = bool(cell.runs) and (side == "stock" or believed(row, sides["stock"], cell))
                times = cell.rate / sides["stock"].rate if good else 0.0
                label = f"{times:.1f}x, {cell.rate:,.0f} tokens/s" if good else _reason(cell)
                axes.barh(at, times, 0.85, color=COLOURS[side], label=None if side in named else side)
                axes.text(times, at, f" {label}", va="center", fontsize=7).set_in_layout(False)
                named.add(side)
                longest, at = max(longest, times), at + 1
            ticks.append(((begin + at - 1) / 2, work(record, row).replace(", ", "\n")))
            at += 1
        axes.set(xlim=(0, longest * 1.35), xlabel="times the tokens per second of stock")
        axes.set_yticks([place for place, _ in ticks], [row for _, row in ticks])
        axes.invert_yaxis()
        made.legend(loc="outside lower center", ncols=3, fontsize=7)
        made.suptitle(f"Training beside stock TRL, {device_of(record)}, {record['date'][:10]} {source}", fontsize=8)
    return made


def _reason(cell: Cell) -> str:
    """Return why a side has no bar, in a few words: the name of its error; the table has all of it."""
    return f"failed: {cell.failed.partition(':')[0][:_SHOWN]}" if cell.failed else "losses differ"
