"""Figures from a record of ``fastpack-trl bench``: tokens/s by side, memory, phases, ratios.

```python
record = json.loads(Path("lora.json").read_text())
breakdown(record, "lora.json")  # a matplotlib Figure; a notebook shows it after %matplotlib inline
```

Each takes a record and, for the caption, the name of its file, and returns None where the record has nothing for it.
Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

from fastpack_trl.bench.canvas import Figure, legend, lines_of_labels, room_for_labels, titled
from fastpack_trl.bench.views import OURS, PLAN, RowView, SideView, rows_of

GIB = 1 << 30
_MOST_BARS = 40

# Okabe and Ito's palette: told apart under every common colour vision deficiency.
_ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _RED, _PURPLE, _GREY = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C",
)  # fmt: skip
PHASE_COLOURS = {
    "data": _ORANGE, "forward": _BLUE, "backward": _SKY, "clipping": _PURPLE, "optimizer": _GREEN, "overhead": _GREY,
    "step": _GREY,
}  # fmt: skip
_SIDES = {"stock": "#999999", "tuned": _SKY, OURS: _ORANGE, PLAN: _RED}
"""Colours of the usual sides, in every figure; of a record with one side of ours it has the colour of `PLAN`."""
_SIDE_COLOURS = (_PURPLE, _GREEN, _BLUE, _YELLOW)


def figures(record: Mapping[str, Any], source: str = "") -> dict[str, Figure]:
    """Return every figure that the record has something for, by name."""
    made = {name: draw(record, source) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def speed(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw tokens per second, a bar per side and row, with its multiple of stock."""
    bars = _bars(record, source, lambda side: side.seconds is not None)
    if bars is None:
        return None
    figure, axes, places = bars
    keys = dict.fromkeys(side.key for _, side, _ in places)
    usual = _SIDES if PLAN in keys else _SIDES | {OURS: _SIDES[PLAN]}
    colours = dict(zip((key for key in keys if key not in usual), cycle(_SIDE_COLOURS), strict=False)) | usual
    for row, side, place in places:
        axes.barh(place, side.rate, height=0.72, color=colours[side.key])
        times = {ratio.by: f"  {ratio.median:.2f} x stock" for ratio in row.ratios_over("stock")}
        axes.annotate(f" {side.rate:,.0f}{times.get(side.key, '')}", (side.rate, place), va="center", fontsize=8)
    axes.set_xlabel("tokens per second (medians)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    room_for_labels(axes, [side.rate for _, side, _ in places], 0.32)
    return titled(figure, record, "Tokens per second, by side")


def breakdown(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw where a step goes: per row and side a bar of the phases' median milliseconds, one after another."""
    bars = _bars(record, source, lambda side: side.seconds is not None)
    if bars is None:
        return None
    figure, axes, places = bars
    shown: dict[str, Any] = {}
    ends = []
    for _, side, place in places:
        left, total = 0.0, (side.seconds or 0.0) * 1000
        for phase, seconds in (side.phases or {"step": side.seconds or 0.0}).items():
            width = max(seconds, 0.0) * 1000  # what is left over of a step may be less than nothing, by rounding
            shown[phase] = axes.barh(place, width, left=left, height=0.72, color=PHASE_COLOURS.get(phase, _GREY))
            left += width
        ends.append(max(left, total))
        digits = 0 if total >= 100 else 1 if total >= 10 else 2
        axes.annotate(f" {total:,.{digits}f}", (ends[-1], place), va="center", fontsize=8)
    axes.set_xlabel("milliseconds per step (medians)")
    room_for_labels(axes, ends)
    legend(figure, shown)
    return titled(figure, record, "Where a step goes", speed=False)


def ratios(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw by how much fastpack is faster, with intervals and a line at 1; what does not help is drawn differently."""
    rows = [row for row in rows_of(record) if row.ratios]
    if not rows:
        return None
    drawn = [ratio for row in rows for ratio in row.ratios]
    alone = len({ratio.by for ratio in drawn}) == 1
    labels = [
        [f"{'' if alone else row.named(ratio.by) + ' '}over {row.named(ratio.over)}" for ratio in row.ratios]
        for row in rows
    ]
    figure, axes, places = lines_of_labels(record, rows, labels, source)
    shown: dict[str, Any] = {}
    for ratio, place in zip(drawn, places, strict=True):
        if ratio.slower:
            meaning, colour, marker = "slower", _RED, "v"
        elif ratio.helps:
            meaning, colour, marker = "faster", _BLUE, "o"
        else:
            meaning, colour, marker = "the interval covers 1", _GREY, "s"
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        shown[meaning] = axes.errorbar(
            ratio.median, place, xerr=error, fmt=marker, markersize=4.5, color=colour, capsize=2.5, linewidth=1.2
        )
        axes.annotate(
            f"{ratio.median:.2f}", (ratio.high, place), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8, color=colour,
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.9)
    low, high = min(ratio.low for ratio in drawn), max(ratio.high for ratio in drawn)
    if high / low > 4:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)  # for the figures behind the intervals
    coverage = min(ratio.coverage for ratio in drawn)
    name = rows[0].named(drawn[0].by) if alone else "ours"
    axes.set_xlabel(f"seconds of the other side / seconds of {name}: median of the rounds, {coverage:.0%} interval")
    legend(figure, shown)
    return titled(figure, record, "Times as fast: above 1 fastpack is faster")


def memory(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw the peak device memory of each side: what lay there before the step, and what the step added."""
    bars = _bars(record, source, lambda side: side.peak_bytes is not None)
    if bars is None:
        return None
    figure, axes, places = bars
    shown: dict[str, Any] = {}
    for _, side, place in places:
        peak = (side.peak_bytes or 0) / GIB
        before = min((side.before_bytes or 0) / GIB, peak)
        shown["before the step"] = axes.barh(place, before, height=0.72, color=_GREY)
        shown["added by the step"] = axes.barh(place, peak - before, left=before, height=0.72, color=_BLUE)
        axes.annotate(f" {peak:,.1f}", (peak, place), va="center", fontsize=8)
    axes.set_xlabel("GiB of device memory at most")
    room_for_labels(axes, [(side.peak_bytes or 0) / GIB for _, side, _ in places])
    legend(figure, shown)
    return titled(figure, record, "Peak memory, by side", speed=False)


FIGURES: dict[str, Callable[[Mapping[str, Any], str], Figure | None]] = {
    "speed": speed,
    "memory": memory,
    "breakdown": breakdown,
    "ratios": ratios,
}
"""By the name that the report gives to the file."""


def _bars(
    record: Mapping[str, Any], source: str, keep: Callable[[SideView], bool]
) -> tuple[Figure, Any, list[tuple[RowView, SideView, float]]] | None:
    """Return a figure, its axes, and row, side and place of each bar; None where no side has what `keep` asks for.

    Rows that a page has no room for are left out.
    """
    drawn: list[tuple[RowView, SideView]] = []
    rows = []
    for row in rows_of(record):
        sides = tuple(side for side in row.sides if keep(side))
        if sides and len(drawn) + len(sides) <= _MOST_BARS:
            rows.append(replace(row, sides=sides))
            drawn += [(row, side) for side in sides]
    if not rows:
        return None
    figure, axes, places = lines_of_labels(record, rows, [[side.name for side in row.sides] for row in rows], source)
    return figure, axes, [(row, side, place) for (row, side), place in zip(drawn, places, strict=True)]
