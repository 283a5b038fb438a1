"""The frame of a figure of ``fastpack-trl bench``: size, style, title and caption, lines of labels, legend."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastpack_trl.bench.views import RowView, device_of, headline
from fastpack_trl.errors import UserError

DPI = 100
_WIDTH, _BAR, _TOP, _CAPTION = 7.6, 0.24, 0.95, 0.3  # inches
_TITLES, _LEGEND = 0.5, 0.2  # inches, of the two lines at the top and of the one below them
_CHARACTER = 0.07  # inches, of a heading and of a label

STYLE = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "figure.facecolor": "white",
}
"""matplotlib's rcParams inside of these functions; what the caller has set is untouched."""

Figure = Any  # matplotlib.figure.Figure


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


def new_figure(record: Mapping[str, Any], height: float, source: str, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of so many inches, its axes (`grid` is of matplotlib's ``subplots``) and the record's caption."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        low = _CAPTION / height
        layout = ConstrainedLayoutEngine(rect=(0, low, 1, 1 - low - (_TITLES + _LEGEND) / height))
        figure = NewFigure(figsize=(_WIDTH, height), layout=layout)
        axes = figure.subplots(**grid)
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    caption = f"{device_of(record)}, {versions}, {record['date'][:10]}"
    figure.text(0.01, 0.08 / height, f"{caption}; {source}" if source else caption, fontsize=7, color="#555555")
    return figure, axes


def titled(figure: Figure, record: Mapping[str, Any], what: str, *, speed: bool = True) -> Figure:
    """Write what the record says at the top, and below it what the figure shows."""
    return headed(figure, textwrap.shorten(headline(record, speed=speed), 88, placeholder=" ..."), what)


def headed(figure: Figure, title: str, what: str) -> Figure:
    """Write `title` at the top, and below it what the figure shows."""
    height = float(figure.get_figheight())
    figure.text(0.01, 1 - 0.22 / height, title, fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - 0.41 / height, what, fontsize=8.5, color="#333333")
    return figure


def lines_of_labels(
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
    figure, axes = new_figure(record, _TOP + _CAPTION + 0.35 + _BAR * (at + 0.5), source)
    axes.set_yticks(places, [name for names in labels for name in names])
    axes.set_ylim(at - 0.2, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    for place, heading in headings:
        text = axes.text(
            0.006, place, heading, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8, fontweight="bold"
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # over a line at 1
    return figure, axes, places


def legend(figure: Figure, shown: Mapping[str, Any], top: float = _TITLES) -> None:
    """Write the meaning of colours and marks on a line of its own, `top` inches below the edge: under two lines."""
    figure.legend(
        list(shown.values()), list(shown), loc="upper left", ncols=min(6, len(shown)), frameon=False, fontsize=8,
        bbox_to_anchor=(0.01, 1 - top / float(figure.get_figheight())), borderaxespad=0.0, borderpad=0.0,
        columnspacing=1.4,
    )  # fmt: skip


def room_for_labels(axes: Any, ends: Iterable[float], share: float = 0.14) -> None:
    """Let bars begin at 0 and leave room for the figures behind the longest."""
    axes.set_xlim(0, (max(ends, default=0.0) or 1.0) * (1 + share))
