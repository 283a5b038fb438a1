"""Table and picture of a record of `benchmarks.fp8_accuracy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.readme_cells import grid
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure
from fastpack_trl.bench.views import device_of

COLOURS = {"bf16": "#999999", "nf4": "#56B4E9", "fp8": "#D55E00"}
NAMES = {"bf16": "bf16", "nf4": "NF4", "fp8": "FP8"}
_MARKS = ("-", "--", ":")
"""By seed."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: the last held-out loss by side and seed, how far gradients are off, and whether FP8 passes."""
    settings = record["settings"]
    size = settings["pretraining"]["parameters"] / 1e6
    head = (
        f"**LoRA over a base in bf16, NF4 and FP8, {device_of(record)}.** {size:.0f} M parameters, {settings['steps']} "
        f"steps of {settings['batch']} rows of {settings['row']:,} tokens; paired seeds."
    )
    lines, said = [], []
    for row in record["rows"]:
        judged = row["judged"]
        for side, errors in row["errors"].items():
            last = judged["last"][side].values() if judged else ()
            mean = f"{judged['mean_apart'][side]:+.4f}" if judged and side in judged["mean_apart"] else "-"
            ordered = sorted(errors)
            off = f"{ordered[len(ordered) // 2]:.1%}, {ordered[-1]:.1%}"
            values = ", ".join(f"{loss:.4f}" for loss in last) or "-"
            lines.append([row["model"], side, values, mean, off])
        if judged:
            answer = "yes" if judged["passes"] else "no"
            spread = f"{judged['spread']:.4f}"
            said.append(f"{row['model']}: FP8 within the spread of bf16's seeds ({spread}) and of NF4: {answer}  ")
    columns = "model | base | held-out loss by seed | >from bf16's, mean | gradients off: median, worst layer"
    return "\n".join([head, "", grid(columns, lines), "", *said])


def plot(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw held-out losses by step, the difference to bf16's of the same seed, and gradient errors by layer.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = record["rows"]
    made, grid = new_figure(record, 2.2 * len(rows) + 1.2, source, nrows=len(rows), ncols=3, squeeze=False)
    shown: dict[str, Any] = {}
    for row, (losses, apart, errors) in zip(rows, grid, strict=True):
        for side, seeds in row["curves"].items():
            for mark, (seed, found) in zip(_MARKS, seeds.items(), strict=False):
                steps, values = zip(*found["held_out"], strict=True)
                (line,) = losses.plot(steps, values, mark, color=COLOURS[side])
                shown.setdefault(f"base in {NAMES[side]}", line)
                base = [loss for _, loss in row["curves"]["bf16"][seed]["held_out"]]
                differences = [one - other for one, other in zip(values, base, strict=True)]
                apart.plot(steps, differences, mark, color=COLOURS[side])
        for side, found in row["errors"].items():
            errors.plot([100 * error for error in found], color=COLOURS[side])
        losses.set_ylabel(f"model {row['model']}")
        errors.set_ylim(bottom=0)
        errors.locator_params(axis="x", integer=True)
    titles = ("held-out loss", "loss less that over bf16", "gradients off fp32's, %")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    for axes, label in zip(grid[-1], ("step", "step", "layer"), strict=True):
        axes.set_xlabel(label)
    legend(made, shown)
    return headed(
        made,
        f"LoRA over a frozen base in bf16, NF4 and FP8, {device_of(record)}",
        "Solid, dashed, dotted: three seeds, the same ones over each base",
    )
