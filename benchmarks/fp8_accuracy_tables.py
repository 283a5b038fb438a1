"""Table and picture of a record of `benchmarks.fp8_accuracy`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from fastpack_trl.bench.canvas import DPI, STYLE, Figure, require_matplotlib
from fastpack_trl.bench.views import device_of

COLOURS = {"bf16": "#999999", "nf4": "#56B4E9", "fp8": "#D55E00"}
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
    lines = [
        head,
        "",
        "| model | base | held-out loss by seed | from bf16's, mean | gradients off: median, worst layer |",
    ]
    lines.append("| --- | --- | --- | ---: | --- |")
    said = []
    for row in record["rows"]:
        judged = row["judged"]
        for side, errors in row["errors"].items():
            last = judged["last"][side].values() if judged else ()
            mean = f"{judged['mean_apart'][side]:+.4f}" if judged and side in judged["mean_apart"] else "-"
            ordered = sorted(errors)
            off = f"{ordered[len(ordered) // 2]:.1%}, {ordered[-1]:.1%}"
            values = ", ".join(f"{loss:.4f}" for loss in last) or "-"
            lines.append(f"| {row['model']} | {side} | {values} | {mean} | {off} |")
        if judged:
            answer = "yes" if judged["passes"] else "no"
            spread = f"{judged['spread']:.4f}"
            said.append(f"{row['model']}: FP8 within the spread of bf16's seeds ({spread}) and of NF4: {answer}  ")
    return "\n".join([*lines, "", *said])


def plot(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw held-out losses by step, the difference to bf16's of the same seed, and gradient errors by layer.

    Raises:
        UserError: matplotlib is missing.
    """
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure as New

        rows = record["rows"]
        made = New(figsize=(10.0, 2.8 * len(rows)), dpi=DPI, layout="constrained")
        grid = made.subplots(len(rows), 3, squeeze=False)
        for row, (losses, apart, errors) in zip(rows, grid, strict=True):
            for side, seeds in row["curves"].items():
                for mark, (seed, found) in zip(_MARKS, seeds.items(), strict=False):
                    steps, values = zip(*found["held_out"], strict=True)
                    label = side if mark == _MARKS[0] else None
                    losses.plot(steps, values, mark, color=COLOURS[side], label=label)
                    base = [loss for _, loss in row["curves"]["bf16"][seed]["held_out"]]
                    differences = [one - other for one, other in zip(values, base, strict=True)]
                    apart.plot(steps, differences, mark, color=COLOURS[side])
            for side, found in row["errors"].items():
                errors.plot([100 * error for error in found], color=COLOURS[side], label=f"{side}: {fmean(found):.1%}")
            losses.set(title=row["model"], xlabel="step", ylabel="held-out loss")
            apart.set(title="from bf16's of the same seed", xlabel="step")
            errors.set(title="gradients off fp32's, %", xlabel="layer")
            losses.legend(fontsize=7)
            errors.legend(fontsize=7)
        made.suptitle(f"LoRA over a frozen base in bf16, NF4 and FP8, {device_of(record)} {source}", fontsize=9)
    return made
