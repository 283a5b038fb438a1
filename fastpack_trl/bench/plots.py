"""Figures from a record of ``fastpack-trl bench``: `breakdown`, `ratios`, `memory`, `memory_over_step`, `rates`.

```python
record = json.loads(Path("lora.json").read_text())
breakdown(record, "lora.json")  # a matplotlib Figure; a notebook shows it after %matplotlib inline
```

Each returns None where the record has nothing for it. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastpack_trl.bench.views import OURS, RowView, SideView, device_of, rows_of
from fastpack_trl.errors import UserError

GIB = 1 << 30
DPI = 100
_WIDTH, _BAR, _TOP, _CAPTION = 7.6, 0.24, 0.75, 0.3  # inches
_MOST_BARS, _MOST_PANELS = 40, 6
_CHARACTER = 0.07  # inches, of a heading and of a label

# Okabe and Ito's palette: told apart under every common colour vision deficiency.
_ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _RED, _PURPLE, _GREY = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C",
)  # fmt: skip
PHASE_COLOURS = {
    "data": _ORANGE, "forward": _BLUE, "backward": _SKY, "clipping": _PURPLE, "optimizer": _GREEN, "overhead": _GREY,
    "step": _GREY,
}  # fmt: skip
_SIDE_COLOURS = (_GREY, _ORANGE, _SKY, _PURPLE, _GREEN, _RED, _YELLOW)
_MARKERS = "osD^vPX*"

STYLE = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "figure.facecolor": "white",
}
"""matplotlib's rcParams inside of these functions; what the caller has set is untouched."""

Figure = Any  # matplotlib.figure.Figure


def figures(record: Mapping[str, Any], source: str = "") -> dict[str, Figure]:
    """Return every figure that the record has something for, by name."""
    made = {name: draw(record, source) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


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
            colour = PHASE_COLOURS.get(phase, _GREY)
            shown[phase] = axes.barh(place, seconds * 1000, left=left, height=0.72, color=colour)
            left += seconds * 1000
        total = (side.seconds or 0.0) * 1000
        axes.annotate(f" {total:,.{_digits(total)}f}", (max(left, total), place), va="center", fontsize=8)
    axes.set_xlabel("milliseconds per step (medians)")
    axes.margins(x=0.12)
    _legend(figure, shown)
    return _titled(figure, record, "Where a step goes")


def ratios(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw by how much fastpack is faster, with intervals and a line at 1; what does not help is drawn differently.

    Args and result as `breakdown`.
    """
    rows = [row for row in rows_of(record) if row.ratios]
    if not rows:
        return None
    ours = list(dict.fromkeys(ratio.by for row in rows for ratio in row.ratios))
    labels = [
        [f"over {ratio.over}" if len(ours) == 1 else f"{ratio.by} over {ratio.over}" for ratio in row.ratios]
        for row in rows
    ]
    figure, axes, places = _rows_of_labels(record, rows, labels, source)
    shown: dict[str, Any] = {}
    for ratio, place in zip([ratio for row in rows for ratio in row.ratios], places, strict=True):
        colour = _RED if ratio.slower else _BLUE if ratio.helps else _GREY
        meaning = "slower" if ratio.slower else "faster" if ratio.helps else "the interval covers 1"
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        marker = "v" if ratio.slower else "o" if ratio.helps else "s"
        shown[meaning] = axes.errorbar(
            ratio.median, place, xerr=error, fmt=marker, markersize=4.5, color=colour, capsize=2.5, linewidth=1.2
        )
        axes.annotate(f"{ratio.median:.2f}", (ratio.median, place - 0.22), ha="center", fontsize=7, color=colour)
    axes.axvline(1.0, color="black", linewidth=0.9)
    found = [value for row in rows for ratio in row.ratios for value in (ratio.low, ratio.high)]
    if max(found) / min(found) > 4:
        axes.set_xscale("log")
        ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32) if min(found) <= tick <= max(found)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    coverage = min(ratio.coverage for row in rows for ratio in row.ratios)
    axes.set_xlabel(
        f"seconds of the other side / seconds of {ours[0] if len(ours) == 1 else 'ours'}, with {coverage:.0%} interval"
    )
    _legend(figure, shown)
    return _titled(figure, record, "Times as fast")


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
        before, peak = (side.before_bytes or 0) / GIB, (side.peak_bytes or 0) / GIB
        shown["before the step"] = axes.barh(place, before, height=0.72, color=_GREY)
        shown["added by the step"] = axes.barh(place, peak - before, left=before, height=0.72, color=_BLUE)
        axes.annotate(f" {peak:,.1f}", (peak, place), va="center", fontsize=8)
    axes.set_xlabel("GiB of device memory at most")
    axes.margins(x=0.12)
    _legend(figure, shown)
    return _titled(figure, record, "Peak memory")


def memory_over_step(record: Mapping[str, Any], source: str = "") -> Figure | None:
    """Draw the device memory at the ends of the phases of the last timed step; None if no side recorded it.

    Args and result as `breakdown`.
    """
    rows = _with_sides(rows_of(record), lambda side: bool(side.memory_marks))[:_MOST_PANELS]
    if not rows:
        return None
    figure, panels = _panels(record, [row.label for row in rows], source)
    colours = _colours(rows)
    shown: dict[str, Any] = {}
    for row, axes in zip(rows, panels, strict=True):
        axes.set_ylabel("GiB allocated")
        axes.set_xlabel("milliseconds since the start of the step")
        for side in row.sides:
            at = [milliseconds for milliseconds, _ in side.memory_marks]
            used = [allocated / GIB for _, allocated in side.memory_marks]
            colour, marker = colours[side.name]
            (shown[side.name],) = axes.plot(at, used, marker=marker, markersize=3.5, color=colour)
    _legend(figure, shown)
    return _titled(figure, record, "Memory over a step")


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
    figure, panels = _panels(record, list(chosen), source)
    colours = _colours([row for rows in chosen.values() for row in rows])
    shown: dict[str, Any] = {}
    for rows, axes in zip(chosen.values(), panels, strict=True):
        for name in dict.fromkeys(side.name for row in rows for side in row.sides):
            points = sorted((row.tokens, side.rate) for row in rows for side in row.sides if side.name == name)
            colour, marker = colours[name]
            lengths, values = zip(*points, strict=True)
            (shown[name],) = axes.plot(lengths, values, marker=marker, markersize=4, color=colour)
        ticks = sorted({row.tokens for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens per row")
        axes.set_ylabel("tokens/s")
    _legend(figure, shown)
    left_out = len(several) - len(chosen)
    return _titled(figure, record, "Tokens per second" + (f" ({left_out} settings left out)" if left_out else ""))


FIGURES: dict[str, Callable[[Mapping[str, Any], str], Figure | None]] = {
    "breakdown": breakdown,
    "ratios": ratios,
    "memory": memory,
    "memory_over_step": memory_over_step,
    "rates": rates,
}
"""By the name that the report gives to the file."""


def save(figure: Figure, file: Path, metadata: Mapping[str, str]) -> None:
    """Write a PNG with `metadata` in its text chunks."""
    figure.savefig(file, dpi=DPI, metadata={"Software": None, **metadata})


def require_matplotlib() -> Any:
    """Import and return matplotlib, here and not with this file.

    Raises:
        UserError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'fastpack-trl[plots]'") from error
    return matplotlib


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


def _new(record: Mapping[str, Any], height: float, source: str, **grid: Any) -> tuple[Figure, Any]:
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        low = _CAPTION / height
        layout = ConstrainedLayoutEngine(rect=(0, low, 1, 1 - low - 0.28 / height))
        figure = NewFigure(figsize=(_WIDTH, height), layout=layout)
        axes = figure.subplots(**grid)
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    caption = f"{device_of(record)}, {versions}, {record['date'][:10]}"
    figure.text(0.01, 0.08 / height, f"{caption}; {source}" if source else caption, fontsize=7, color="#555555")
    return figure, axes


def _titled(figure: Figure, record: Mapping[str, Any], title: str) -> Figure:
    height = float(figure.get_figheight())
    figure.text(0.01, 1 - 0.22 / height, f"{title} ({record['case']})", fontsize=11, fontweight="bold")
    return figure


def _bars(record: Mapping[str, Any], rows: Sequence[RowView], source: str) -> tuple[Figure, Any, list[Any]]:
    figure, axes, places = _rows_of_labels(record, rows, [[side.name for side in row.sides] for row in rows], source)
    return figure, axes, list(zip([side for row in rows for side in row.sides], places, strict=True))


def _rows_of_labels(
    record: Mapping[str, Any], rows: Sequence[RowView], labels: Sequence[Sequence[str]], source: str
) -> tuple[Figure, Any, list[float]]:
    """Return a figure with a line per label, from the top down, under the heading of its row, and the lines' places."""
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    at = 0.0
    longest = max(len(name) for names in labels for name in names)
    room = min(92, int(_WIDTH / _CHARACTER) - longest - 2)  # characters of a heading; the labels stand left of it
    for row, names in zip(rows, labels, strict=True):
        lines = textwrap.wrap(row.label, room)
        at += 0.75 * len(lines)
        headings.append((at - 0.55, "\n".join(lines)))
        places += [at + index for index in range(len(names))]
        at += len(names) + 0.35
    height = _TOP + _CAPTION + 0.35 + _BAR * (at + 0.5)
    figure, axes = _new(record, height, source)
    axes.set_yticks(places, [name for names in labels for name in names])
    axes.set_ylim(at - 0.2, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    for place, heading in headings:
        axes.text(
            0.006, place, heading, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8, fontweight="bold"
        )
    return figure, axes, places


def _panels(record: Mapping[str, Any], titles: Sequence[str], source: str) -> tuple[Figure, list[Any]]:
    columns = min(2, len(titles))
    lines = -(-len(titles) // columns)
    figure, axes = _new(record, 2.5 * lines + 1.0, source, nrows=lines, ncols=columns, squeeze=False)
    panels = list(axes.flat)
    for panel in panels[len(titles) :]:
        panel.set_visible(False)
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title("\n".join(textwrap.wrap(title, 50 if columns == 2 else 100)), fontsize=8)
    return figure, panels[: len(titles)]


def _colours(rows: Iterable[RowView]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker per side; ours is the same in every figure."""
    names = dict.fromkeys(side.name for row in rows for side in row.sides)
    others = [name for name in names if name != OURS]
    colours = {
        name: (_SIDE_COLOURS[index % len(_SIDE_COLOURS)], _MARKERS[1 + index % (len(_MARKERS) - 1)])
        for index, name in enumerate(others)
    }
    return colours | {OURS: (_BLUE, _MARKERS[0])}


def _legend(figure: Figure, shown: Mapping[str, Any]) -> None:
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside upper right",
        ncols=min(6, len(shown)),
        frameon=False,
        fontsize=8,
    )


def _digits(milliseconds: float) -> int:
    return 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
