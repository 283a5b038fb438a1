"""The picture of a record of `benchmarks.first_step`: seconds from ``train()`` on, by step, of each side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.side_plot import COLOURS
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure
from fastpack_trl.bench.views import device_of

_HEIGHT = 3.8  # inches
TITLES = {
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA,\nnot packed",
    "qwen3-8b lora 2x4": "Qwen3-8B LoRA,\nnot packed",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 layers),\nLoRA on experts",
}
"""By row; others are called as on the command line."""
_LINES = {
    ("stock", "cold"): ("stock", COLOURS["stock"], "-", "o"),
    ("fastpack", "cold"): ("fastpack, empty caches", COLOURS["fastpack"], "-", "s"),
    ("fastpack", "warm"): ("fastpack, filled caches", COLOURS["fastpack"], "--", "D"),
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
    rows = record["rows"]
    made, panels = new_figure(record, _HEIGHT, source, ncols=len(rows), squeeze=False)
    shown: dict[str, Any] = {}
    for axes, row in zip(panels[0], rows, strict=True):
        for times in wall_times(row["runs"], record["settings"]["steps"]):
            label, colour, line, marker = _LINES[times.side, times.cache]
            points = (times.measured | times.beyond).items()
            (shown[label],) = axes.plot(*zip(*points, strict=True), line, color=colour)
            for these, fill in ((times.measured, colour), (times.beyond, "white")):
                axes.scatter(these.keys(), these.values(), 16, fill, marker, edgecolors=colour, zorder=3)
        axes.set_title(TITLES.get(row["row"], row["row"]), fontsize=8)
        axes.set(xlabel="optimizer steps", ylim=(0, None))
    panels[0][0].set_ylabel("seconds")
    legend(made, shown)
    return headed(
        made,
        f"Time from train() to the end of a step, {device_of(record)}",
        "First steps with all that is made in them; hollow marks are not run, but reckoned from the last steps",
    )
