"""The picture of a comparison: ``fastpack-trl bench --plot FILE.png``, or `draw` in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError

STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": "#E4E4E4", "figure.facecolor": "white",
}  # fmt: skip
"""matplotlib's rcParams inside of `draw`; what the caller has set is untouched."""
COLORS = {"stock": "#999999", "stock_compiled": "#56B4E9", "fastpack": "#D55E00", "fastpack_plan": "#E69F00"}


def draw(record: Mapping[str, Any], file: str | Path | None = None) -> Any:
    """Draw speed and memory of each side, and their losses on top of each other; write a PNG to `file`."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    (row,) = record["rows"]
    sides = {name: side for name, side in row["sides"].items() if "failed" not in side}
    colors = [COLORS[name] for name in sides]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.3))
        times = [[side["seconds"][name] for name in ("median", "q3", "q1")] for side in sides.values()]
        speeds, low, high = zip(*([times[0][0] / second for second in each] for each in times), strict=True)
        labels = [f"{speed:.2f}x\n{1e3 * median:,.0f} ms" for speed, (median, *_) in zip(speeds, times, strict=True)]
        _bars(panels[0], "speed, first side = 1 (lines: quartiles)", sides, colors, speeds, labels)
        spread = [[abs(a - b) for a, b in zip(speeds, ends, strict=True)] for ends in (low, high)]
        panels[0].errorbar(range(len(sides)), speeds, yerr=spread, fmt="none", ecolor="black", capsize=3)
        panels[0].set_ylim(0, 1.1 * max(high))
        memory = [side["reserved_gib"] for side in sides.values()]
        rates = [side["tokens_per_second"] or 0.0 for side in sides.values()]
        if any(memory):
            _bars(panels[1], "GiB reserved at most", sides, colors, memory, [f"{value:.1f}" for value in memory])
        else:  # the CPU's memory is not measured
            _bars(panels[1], "tokens per second", sides, colors, rates, [f"{rate:,.0f}" for rate in rates])
        widths = range(2 * len(sides), 0, -2)  # the first line is the widest: equal losses show all of them
        for (name, side), color, width in zip(sides.items(), colors, widths, strict=True):
            steps = range(1, len(side["losses"]) + 1)
            panels[2].plot(steps, side["losses"], color=color, linewidth=width, label=name)
        panels[2].set_xlabel("step")
        panels[2].xaxis.get_major_locator().set_params(integer=True)
        panels[2].set_title(f"loss (largest difference: {row['loss_difference']:.0e})", fontsize=9)
        panels[2].legend(frameon=False)
        machine, setting = record["machine"], next(iter(sides.values()))["setting"]
        figure.suptitle(f"{setting}\n{machine.get('gpu') or machine['processor']}", fontsize=10, fontweight="bold")
    if file is not None:
        figure.savefig(file, dpi=150)
    return figure


def require_matplotlib() -> Any:
    """Import and return matplotlib, here and not with this file; raise `UserError` if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install 'fastpack-trl[plots]'") from error
    return matplotlib


def _bars(axes: Any, title: str, sides: Mapping[str, Any], colors: Any, values: Any, labels: list[str]) -> None:
    bars = axes.bar(list(range(len(sides))), values, color=colors, width=0.62)
    axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8, fontweight="bold")
    axes.set_xticks(range(len(sides)), [name.replace("_", "\n") for name in sides])
    axes.set_ylim(0, 1.1 * max(values))
    axes.grid(visible=False, axis="x")
    axes.set_title(title, fontsize=9)
