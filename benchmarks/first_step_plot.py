"""The picture of a record of `benchmarks.first_step`: seconds from ``train()`` on, by step, of each side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastpack_trl.bench.canvas import DPI, STYLE, Figure, require_matplotlib
from fastpack_trl.bench.plots import PHASE_COLOURS
from fastpack_trl.bench.views import device_of

_PANEL = 3.6  # inches
TITLES = {
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA, not packed",
    "qwen3-8b lora 2x4": "Qwen3-8B LoRA, not packed",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 layers), expert LoRA",
}
"""By row; others are called as on the command line."""
_LINES = {
    ("stock", "cold"): ("stock", PHASE_COLOURS["overhead"], "-", "o"),
    ("fastpack", "cold"): ("fastpack, empty caches", PHASE_COLOURS["forward"], "-", "s"),
    ("fastpack", "warm"): ("fastpack, filled caches", PHASE_COLOURS["forward"], "--", "D"),
}
"""Label, colour, line and marker of a side and cache."""


@dataclass(frozen=True, slots=True)
class WallTimes:
    """Seconds from ``train()`` to the end of a step, of one side and cache."""

    side: str
    cache: str
    measured: dict[int, float]
    """By steps. Stock's are all of one run; ours of one for each length, the first step of the longest."""
    beyond: dict[int, float]
    """Of longer runs: those of the longest measured one and, for each step more, the time of its last ones."""


def wall_times(runs: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Iterator[WallTimes]:
    """Yield the times of each side and cache, with those of runs of `steps` steps that are longer than any measured."""
    for side, cache in _LINES:
        ran = [run for run in runs if (run["side"], run["cache"]) == (side, cache) and "seconds" in run]
        if not ran:
            continue
        longest = max(ran, key=lambda run: (run["long"], run["steps"]))
        of_it = {int(step): seconds for step, seconds in longest["seconds"].items()}
        lengths = {run["steps"]: run["seconds"][str(run["steps"])] for run in ran if not run["long"]}
        last = longest["steps"]
        measured = of_it if side == "stock" else {1: of_it[1]} | (lengths or {last: of_it[last]})
        beyond = {
            count: of_it[last] + (count - last) * longest["step_seconds"] for count in sorted(steps) if count > last
        }
        yield WallTimes(side, cache, dict(sorted(measured.items())), beyond)


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
            for times in wall_times(row["runs"], record["settings"]["steps"]):
                label, colour, line, marker = _LINES[times.side, times.cache]
                points = (times.measured | times.beyond).items()
                axes.plot(*zip(*points, strict=True), line, color=colour, label=label)
                for these, fill in ((times.measured, colour), (times.beyond, "white")):
                    axes.scatter(these.keys(), these.values(), 16, fill, marker, edgecolors=colour, zorder=3)
            axes.set(
                title=TITLES.get(row["row"], row["row"]),
                xlabel="optimizer steps",
                ylabel="seconds from train()",
                ylim=(0, None),
            )
            axes.legend()
        caption = f"{device_of(record)}, {record['date'][:10]}; hollow: from the time of the last steps"
        made.suptitle(f"{caption}; {source}" if source else caption, fontsize=7)
    return made
