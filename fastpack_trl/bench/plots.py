"""Figures from a record of ``fastpack-trl bench``: tokens/s by side and by row length, memory, phases, ratios.

```python
record = json.loads(Path("lora.json").read_text())
breakdown(record, "lora.json")  # a matplotlib Figure; a notebook shows it after %matplotlib inline
```

Each returns None where the record has nothing for it. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastpack_trl.bench.canvas import (
    Figure,
    at_the_ends,
    legend,
    panels_of,
    room_for_labels,
    rows_of_labels,
    titled,
)
from fastpack_trl.bench.names import OURS, PLAN
from fastpack_trl.bench.views import RowView, SideView, rows_of

GIB = 1 << 30
_MOST_BARS, _MOST_PANELS = 40, 6

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
_MARKERS = "osD^vPX*"


def figures(record: Mapping[str, Any], source: str = "") -> dict[str, Figure]:
    """Return every figure that the record has something for, by name."""
    made = {name: draw(record, source) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def speed(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw tokens per second, a bar per side and row, with its multiple of stock.

    Args:
        record: of any case whose sides have times.
        source: the file of the record, for the caption.
    """
    rows = _with_sides(rows_of(record), lambda side: side.seconds is not None)
    if not rows or record["case"] == "attention":
        return None
    figure, axes, places = _bars(record, rows, source)
    colours = _colours(rows)
    times = {(row.label, ratio.by): ratio.median for row in rows for ratio in row.ratios_over("stock")}
    labels = [(row.label, side.key) for row in rows for side in row.sides]
    for (side, place), label in zip(places, labels, strict=True):
        axes.barh(place, side.rate, height=0.72, color=colours[side.key][0])
        multiple = f"  {times[label]:.2f} x stock" if label in times else ""
        axes.annotate(f" {side.rate:,.0f}{multiple}", (side.rate, place), va="center", fontsize=8)
    axes.set_xlabel("tokens per second (medians)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    room_for_labels(axes, [side.rate for side, _ in places], 0.32)
    return titled(figure, record, "Tokens per second, by side")


def breakdown(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw where a step goes: per row and side a bar of the phases' median milliseconds, one after another.

    Args:
        record: of any case whose sides have times.
        source: the file of the record, for the caption.
    """
    rows = _with_sides(rows_of(record), lambda side: side.seconds is not None)
    if not rows or record["case"] == "attention":
        return None
    figure, axes, places = _bars(record, rows, source)
    shown: dict[str, Any] = {}
    for side, place in places:
        left = 0.0
        for phase, seconds in (side.phases or {"step": side.seconds or 0.0}).items():
            seconds = max(seconds, 0.0)  # what is left over of a step may be less than nothing, by rounding
            colour = PHASE_COLOURS.get(phase, _GREY)
            shown[phase] = axes.barh(place, seconds * 1000, left=left, height=0.72, color=colour)
            left += seconds * 1000
        total = (side.seconds or 0.0) * 1000
        axes.annotate(f" {total:,.{_digits(total)}f}", (max(left, total), place), va="center", fontsize=8)
    axes.set_xlabel("milliseconds per step (medians)")
    ends = [max(sum(max(part, 0.0) for part in side.phases.values()), side.seconds or 0.0) * 1000 for side, _ in places]
    room_for_labels(axes, ends)
    legend(figure, shown)
    return titled(figure, record, "Where a step goes", speed=False)


def ratios(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw by how much fastpack is faster, with intervals and a line at 1; what does not help is drawn differently.

    Args and result as `breakdown`.
    """
    rows = [row for row in rows_of(record) if row.ratios]
    if not rows:
        return None
    ours = list(dict.fromkeys(ratio.by for row in rows for ratio in row.ratios))
    labels = [
        [
            f"over {row.named(ratio.over)}" if len(ours) == 1 else f"{row.named(ratio.by)} over {row.named(ratio.over)}"
            for ratio in row.ratios
        ]
        for row in rows
    ]
    figure, axes, places = rows_of_labels(record, rows, labels, source)
    shown: dict[str, Any] = {}
    for ratio, place in zip([ratio for row in rows for ratio in row.ratios], places, strict=True):
        colour = _RED if ratio.slower else _BLUE if ratio.helps else _GREY
        meaning = "slower" if ratio.slower else "faster" if ratio.helps else "the interval covers 1"
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        marker = "v" if ratio.slower else "o" if ratio.helps else "s"
        shown[meaning] = axes.errorbar(
            ratio.median, place, xerr=error, fmt=marker, markersize=4.5, color=colour, capsize=2.5, linewidth=1.2
        )
        axes.annotate(
            f"{ratio.median:.2f}", (ratio.high, place), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8, color=colour,
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.9)
    found = [value for row in rows for ratio in row.ratios for value in (ratio.low, ratio.high)]
    if max(found) / min(found) > 4:
        axes.set_xscale("log")
        ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32) if min(found) <= tick <= max(found)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.margins(x=0.12)  # for the figures behind the intervals
    coverage = min(ratio.coverage for row in rows for ratio in row.ratios)
    name = rows[0].named(ours[0]) if len(ours) == 1 else "ours"
    axes.set_xlabel(
        f"seconds of the other side / seconds of {name}, median of the rounds' with {coverage:.0%} interval"
    )
    legend(figure, shown)
    return titled(figure, record, "Times as fast: above 1 fastpack is faster")


def memory(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw the peak device memory of each side: what lay there before the step, and what the step added.

    Args and result as `breakdown`.
    """
    rows = _with_sides(rows_of(record), lambda side: side.peak_bytes is not None)
    if not rows or record["case"] == "attention":
        return None
    figure, axes, places = _bars(record, rows, source)
    shown: dict[str, Any] = {}
    for side, place in places:
        peak = (side.peak_bytes or 0) / GIB
        before = min((side.before_bytes or 0) / GIB, peak)
        shown["before the step"] = axes.barh(place, before, height=0.72, color=_GREY)
        shown["added by the step"] = axes.barh(place, peak - before, left=before, height=0.72, color=_BLUE)
        axes.annotate(f" {peak:,.1f}", (peak, place), va="center", fontsize=8)
    axes.set_xlabel("GiB of device memory at most")
    room_for_labels(axes, [(side.peak_bytes or 0) / GIB for side, _ in places])
    legend(figure, shown)
    return titled(figure, record, "Peak memory, by side", speed=False)


def memory_over_step(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw the device memory at the ends of the phases of the last timed step; None if no side recorded it.

    Args and result as `breakdown`.
    """
    rows = _with_sides(rows_of(record), lambda side: bool(side.memory_marks))[:_MOST_PANELS]
    if not rows:
        return None
    figure, panels = panels_of(record, [row.label for row in rows], source)
    colours = _colours(rows)
    shown: dict[str, Any] = {}
    for row, axes in zip(rows, panels, strict=True):
        axes.set_ylabel("GiB allocated")
        axes.set_xlabel("milliseconds since the start of the step")
        for side in row.sides:
            at = [milliseconds for milliseconds, _ in side.memory_marks]
            used = [allocated / GIB for _, allocated in side.memory_marks]
            colour, marker = colours[side.key]
            (shown[side.name],) = axes.plot(at, used, marker=marker, markersize=3.5, color=colour)
    legend(figure, shown)
    return titled(figure, record, "Memory over a step", speed=False)


def rates(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw tokens per second against row length, one line per side; None if no setting has two row lengths.

    Args and result as `breakdown`.
    """
    groups: dict[str, list[RowView]] = {}
    for row in rows_of(record):
        if row.sides:
            groups.setdefault(row.group, []).append(row)
    several = {name: rows for name, rows in groups.items() if len({row.tokens for row in rows}) > 1}
    chosen = dict(list(several.items())[:_MOST_PANELS])
    if not chosen:
        return None
    figure, panels = panels_of(record, list(chosen), source)
    colours = _colours([row for rows in chosen.values() for row in rows])
    shown: dict[str, Any] = {}
    for rows, axes in zip(chosen.values(), panels, strict=True):
        ends: list[tuple[float, str, str]] = []
        for key in dict.fromkeys(side.key for row in rows for side in row.sides):
            points = sorted((row.tokens, side.rate) for row in rows for side in row.sides if side.key == key)
            (name,) = {side.name for row in rows for side in row.sides if side.key == key}
            colour, marker = colours[key]
            lengths, values = zip(*points, strict=True)
            (shown[name],) = axes.plot(lengths, values, marker=marker, markersize=4, color=colour)
            ends.append((values[-1], name, colour))
        ticks = sorted({row.tokens for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens per row")
        axes.set_ylabel("tokens/s")
        if len(chosen) == 1:
            at_the_ends(axes, ticks[-1], ends)
    if len(chosen) > 1:
        legend(figure, shown)
    left_out = len(several) - len(chosen)
    said = f" ({left_out} settings left out)" if left_out else ""
    return titled(figure, record, f"Tokens per second against row length{said}")


FIGURES: dict[str, Callable[[Mapping[str, Any], str], Figure | None]] = {
    "speed": speed,
    "rates": rates,
    "memory": memory,
    "breakdown": breakdown,
    "ratios": ratios,
    "memory_over_step": memory_over_step,
}
"""By the name that the report gives to the file."""


def _with_sides(rows: Iterable[RowView], keep: Callable[[SideView], bool]) -> list[RowView]:
    """Return the rows with the sides for which `keep` holds; no more bars than a page has room for."""
    from dataclasses import replace

    found, bars = [], 0
    for row in rows:
        sides = tuple(side for side in row.sides if keep(side))
        bars += len(sides)
        if sides and bars <= _MOST_BARS:
            found.append(replace(row, sides=sides))
    return found


def _bars(record: Mapping[str, Any], rows: Sequence[RowView], source: str) -> tuple[Figure, Any, list[Any]]:
    figure, axes, places = rows_of_labels(record, rows, [[side.name for side in row.sides] for row in rows], source)
    return figure, axes, list(zip([side for row in rows for side in row.sides], places, strict=True))


def _colours(rows: Iterable[RowView]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker per key of a side; the usual sides have theirs in every figure."""
    keys = list(dict.fromkeys(side.key for row in rows for side in row.sides))
    usual = _SIDES if PLAN in keys else _SIDES | {OURS: _SIDES[PLAN]}
    others = [key for key in keys if key not in usual]
    colours = usual | {key: _SIDE_COLOURS[index % len(_SIDE_COLOURS)] for index, key in enumerate(others)}
    places = [*usual, *others]
    return {key: (colours[key], _MARKERS[places.index(key) % len(_MARKERS)]) for key in keys}


def _digits(milliseconds: float) -> int:
    return 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
