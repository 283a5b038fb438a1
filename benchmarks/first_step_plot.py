"""The picture of a record of `benchmarks.first_step`: seconds from ``train()`` on, by step, of each side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastpack_trl.bench.plots import DPI, PHASE_COLOURS, STYLE, Figure, require_matplotlib
from fastpack_trl.bench.views import device_of

_PANEL = 3.6  # inches
_LINES = {
    ("stock", "cold"): ("stock", PHASE_COLOURS["overhead"], "-", "o"),
    ("fastpack", "cold"): ("fastpack, empty caches", PHASE_COLOURS["forward"], "-", "s"),
    ("fastpack", "warm"): ("fastpack, filled caches", PHASE_COLOURS["forward"], "--", "D"),
}
"""Label, colour, line and marker of a side and cache."""


def wall_times(runs: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[tuple[int, float]]]]:
    """Yield side, cache and (steps, seconds from ``train()`` to the end of that step), in order.

    Stock's are all of one run. Ours have a run for each length, whose last step counts; their first step is that of the
    longest.
    """
    for side, cache in _LINES:
        ran = [run for run in runs if (run["side"], run["cache"]) == (side, cache) and "seconds" in run]
        whole = sorted((run for run in ran if not run["long"]), key=lambda run: run["steps"])
        if not whole:
            continue
        longest = {int(step): seconds for step, seconds in whole[-1]["seconds"].items()}
        points = {1: longest[1]}
        if side == "stock":
            points |= longest
        else:
            points |= {run["steps"]: run["seconds"][str(run["steps"])] for run in whole}
        yield side, cache, sorted(points.items())


def figure(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw a panel for each row of the record.

    Args:
        record: read from JSON.
        source: the file of the record, for the caption.

    Raises:
        UserError: matplotlib is missing.
    """
    matplotlib = require_matplotlib()
    rows = record["rows"]
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure as New

        made = New(figsize=(_PANEL * len(rows), _PANEL), dpi=DPI, layout="constrained")
        for axes, row in zip(made.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
            for side, cache, points in wall_times(row["runs"]):
                label, colour, line, marker = _LINES[side, cache]
                axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, markersize=4, label=label)
            axes.set(title=row["row"], xlabel="optimizer steps", ylabel="seconds from train()", ylim=(0, None))
            axes.legend()
        caption = f"{device_of(record)}, {record['date'][:10]}"
        made.suptitle(f"{caption}; {source}" if source else caption, fontsize=7)
    return made
