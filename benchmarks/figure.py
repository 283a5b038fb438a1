"""README's figure: speed over TRL, and memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import OURS, README_ROWS, SAME_MEMORY
from benchmarks.first_pages import readme_rows, speed_of
from benchmarks.records import Run
from benchmarks.sides import Side
from fastpack_trl.bench.picture import COLORS as PALETTE
from fastpack_trl.bench.picture import require_matplotlib

COLORS = dict(zip(("trl", "trl compiled", OURS, SAME_MEMORY), PALETTE.values(), strict=True))
INK = "#7D848F"
"""Text and lines of a figure: readable on white and on black."""


def drawn_from(records: Sequence[Run]) -> str:
    """Return a hash of the figures that the picture shows, which it holds as its text."""
    figures = [
        (row, name, sides[name].whole, sides[name].peak)
        for row, sides in readme_rows(records).items()
        for name in _drawn(sides)
    ]
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:16]


def save(figure: Any, file: Path, description: str) -> None:
    """Write a picture for phones, and for light and dark pages: text stays text, the background is clear."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastpack"}):
        figure.savefig(file, metadata={"Description": description, "Date": None}, transparent=True)


def plain(axes: Any, title: str) -> None:
    """Give axes a title, and the color of text; leave them only the lower line."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def _drawn(sides: Mapping[str, Side]) -> list[str]:
    return [name for name in COLORS if name in sides and speed_of(sides, name) != "losses differ"]


def draw(records: Sequence[Run], file: Path) -> None:
    """Draw README's rows: speed over TRL as bars that point up, and memory below them."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = {row: sides for row, sides in readme_rows(records).items() if row in README_ROWS}
    figure, bars = Figure(figsize=(5.2, 4.6), layout="constrained"), dict[str, Any]()
    speed, memory = figure.subplots(nrows=2)
    for place, sides in enumerate(rows.values()):
        good = _drawn(sides)
        for axes, names in ((speed, good), (memory, [name for name in good if sides[name].peak])):
            for index, name in enumerate(names):
                at = place + 0.21 * (index - (len(names) - 1) / 2)
                value = sides[name].times(sides["trl"], whole=True) if axes is speed else sides[name].peak
                bars[name] = axes.bar(at, value, 0.19, color=COLORS[name])
                told, above = f"{value:.{int(axes is speed)}f}", {"xytext": (0, 2), "textcoords": "offset points"}
                axes.annotate(told, (at, value), ha="center", fontsize=8, color=INK, **above)
    for axes, title in ((speed, "speed, TRL = 1 (higher is faster)"), (memory, "peak memory, GiB")):
        plain(axes, title)
        axes.set_xticks(range(len(rows)), [README_ROWS[row][1] for row in rows])
        axes.set_yticks([])
        axes.margins(y=0.14)
    names = [name.replace("trl", "TRL").replace(" same memory", ", recomputing as TRL") for name in bars]
    figure.legend(
        bars.values(), names, ncols=2, loc="outside upper center", fontsize=8.5, frameon=False, labelcolor=INK
    )
    save(figure, file, drawn_from(records))
