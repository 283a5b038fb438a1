"""Draw the pictures of `docs/concepts.md` and `docs/architecture.md`: ``python docs/figures/draw.py``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
COLORS = ("#0072B2", "#D55E00", "#009E73")
GRAY = "#B8B8B8"
DARK = """@media (prefers-color-scheme: dark) {
text:not([style*="fill: #"]), text[style*="fill: #444444"], text[style*="fill: #777777"] {fill: #d0d4dc !important}
[style*="stroke: #444444"], [style*="stroke: #000000"] {stroke: #d0d4dc !important}
path[style*="fill: #444444"] {fill: #d0d4dc !important}
path[style*="stroke: #ffffff"] {stroke: #1e2129 !important}
path[style*="fill: #ffffff"] {fill: none !important}
}"""
"""Colors on a dark page, of what is black, gray or white on a light one."""
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fastpack", "font.family": "sans-serif", "font.size": 11}

Token = tuple[int, int]
"""Document of a token (-1: shared by all), and its position."""


def draw_row(axes: Axes, tokens: Sequence[Token]) -> None:
    """Draw tokens as colored cells, with their position ids inside."""
    for index, (document, position) in enumerate(tokens):
        color = GRAY if document < 0 else COLORS[document]
        axes.add_patch(Rectangle((index, 0), 1, 1, facecolor=color, edgecolor="white", linewidth=2))
        axes.text(index + 0.5, 0.5, str(position), ha="center", va="center", color="white", weight="bold")
    axes.text(-0.3, 0.5, "position_ids", ha="right", va="center")
    axes.set(xlim=(-3.2, len(tokens) + 0.3), ylim=(-1.1, 1.7))
    axes.set_aspect("equal")
    axes.axis("off")


def draw_mask(axes: Axes, tokens: Sequence[Token]) -> None:
    """Draw which token (a line) attends to which (a column)."""
    for line, (document, _) in enumerate(tokens):
        for column, (other, _) in enumerate(tokens[: line + 1]):
            seen = other in (document, -1)
            color = "white" if not seen else GRAY if document < 0 else COLORS[document]
            axes.add_patch(Rectangle((column, line), 1, 1, facecolor=color, edgecolor="white", linewidth=1))
    axes.add_patch(Rectangle((0, 0), len(tokens), len(tokens), fill=False, edgecolor="#444444"))
    axes.set(xlim=(-0.2, len(tokens) + 0.2), ylim=(len(tokens) + 0.2, -0.2))
    axes.set_xlabel("attended token")
    axes.set_ylabel("token")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal")
    for side in axes.spines.values():
        side.set_visible(False)


def packed_row() -> None:
    """Three documents, their boundaries, and the mask."""
    lengths = (3, 2, 4)
    tokens = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    figure, (row, mask) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=(2.2, 1))
    draw_row(row, tokens)
    boundaries = [0, 3, 5, 9]
    for document, (start, end) in enumerate(pairwise(boundaries)):
        row.text(
            (start + end) / 2, 1.2, f"document {'ABC'[document]}", ha="center", va="bottom", color=COLORS[document]
        )
    for boundary in boundaries:
        row.plot([boundary, boundary], [-0.35, 0], color="#444444", linewidth=1)
        row.text(boundary, -0.45, str(boundary), ha="center", va="top")
    row.text(-0.3, -0.6, "cu_seqlens", ha="right", va="center")
    draw_mask(mask, tokens)
    save(figure, "packed-row")


def shared_prefix() -> None:
    """A prefix, and two documents that attend to it."""
    tokens = [(-1, 0), (-1, 1), (-1, 2), (0, 3), (0, 4), (0, 5), (1, 3), (1, 4)]
    figure, (row, mask) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=(2.2, 1))
    draw_row(row, tokens)
    for middle, text, color in ((1.5, "shared prefix", "#777777"), (4.5, "A", COLORS[0]), (7, "B", COLORS[1])):
        row.text(middle, 1.2, text, ha="center", va="bottom", color=color)
    draw_mask(mask, tokens)
    save(figure, "shared-prefix")


def memory_levels() -> None:
    """Device memory for activations over one step of four layers, per level."""
    layers, full, small = 4, 1.0, 0.2
    curves = {
        "keep": [full * n for n in (0, 1, 2, 3, 4, 3, 2, 1, 0)],
        "checkpoint": _steps(layers, full, small),
        "offload": _steps(layers, full, 0.0),
    }
    figure, axes = plt.subplots(figsize=(9, 3))
    for color, (name, values) in zip(COLORS, curves.items(), strict=True):
        axes.plot(
            [index / (len(values) - 1) * 2 * layers for index in range(len(values))], values, color=color, label=name
        )
    axes.axvline(layers, color=GRAY, linewidth=1)
    axes.set(xlim=(0, 2 * layers), ylim=(0, 4.6), ylabel="activations on the GPU", yticks=[])
    axes.set_xticks([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], ["1", "2", "3", "4", "4", "3", "2", "1"])
    axes.text(2, 4.2, "forward, layer", ha="center")
    axes.text(5.4, 4.2, "backward, layer", ha="center")
    axes.legend(loc="upper right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, "memory-levels")


def _steps(layers: int, full: float, held: float) -> list[float]:
    """Return the memory when each layer holds `held`, and one layer at a time needs `full` more."""
    values = [0.0]
    for layer in range(layers):
        values += [held * layer + full, held * (layer + 1)]
    for layer in reversed(range(layers)):
        values += [held * (layer + 1) + full, held * layer]
    return values


Step = tuple[str, str, str]
"""What runs, what it does, and the files that do it."""

HOST: Sequence[Step] = (
    ("data set", "TRL tokenizes, truncates and packs", "packing/dataset.py"),
    ("data loader", "rows as NumPy arrays, not as Python lists", "packing/batching.py"),
    ("PackingCollator", "one row, its labels and its PackedBatch", "packing/collator.py  packing/packed_batch.py"),
    ("copy to the device", "each tensor once, from pinned memory", "packing/packed_inputs.py"),
    ("get_batch_samples", "the rows of an optimizer step are planned", "trainers/sft.py  step/merging.py"),
    ("training_step", "gradients of several processes, NaN filter", "trainers/sft.py  capture/ddp.py"),
    ("OptimizerStep.run", "merged rows; again if out of memory", "trainers/sft_step.py"),
)
"""Of one packed micro-batch, until TRL's training step is called."""
DEVICE: Sequence[Step] = (
    ("compute_loss", "calls the model, normalizes its loss", "step/sync_free.py  step/loss.py"),
    ("decoder", "a pre-hook prepares the row; or graphs replay", "attention/install.py  capture/graphs.py"),
    ("each layer", "attention; LoRA; experts", "attention/varlen.py  lora/linear.py  moe/block.py"),
    ("head and loss", "at the positions with a loss only", "step/loss.py  step/head.py"),
    ("metrics", "stay on the device until the log reads them", "step/metrics.py"),
    ("backward", "layers are recomputed, inputs fetched", "checkpointing/plan.py  checkpointing/offload.py"),
    ("optimizer step", "clipping, counting, zero_grad over lists", "step/hostwork.py"),
)
"""What follows."""


def draw_step(axes: Axes, corner: tuple[float, float], step: Step, color: str, width: float = 4.6) -> None:
    """Draw one step as a box of height 0.8."""
    (left, bottom), (title, text, files) = corner, step
    axes.add_patch(Rectangle(corner, width, 0.8, facecolor="none", edgecolor=color, linewidth=1))
    axes.add_patch(Rectangle(corner, 0.08, 0.8, facecolor=color, edgecolor=color, linewidth=1))
    axes.text(left + 0.2, bottom + 0.61, title, va="center", weight="bold", fontsize=10)
    axes.text(left + 0.2, bottom + 0.39, text, va="center", fontsize=9, color="#444444")
    axes.text(left + 0.2, bottom + 0.16, files, va="center", fontsize=8, family="monospace", color="#444444")


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "->", "color": "#444444", "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=style)


def canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """Return an empty figure, in inches."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def micro_batch() -> None:
    """The walk of one packed micro-batch, from the data set to the optimizer step."""
    figure, axes = canvas(10, 7.8)
    for left, color, heading, steps in (
        (0.1, COLORS[0], "on the host, once per batch", HOST),
        (5.3, COLORS[1], "on the device, without a synchronization", DEVICE),
    ):
        axes.text(left, 7.6, heading, va="center", color=color, weight="bold")
        for index, step in enumerate(steps):
            bottom = 6.5 - 1.05 * index
            draw_step(axes, (left, bottom), step, color)
            if index:
                draw_arrow(axes, (left + 2.3, bottom + 1.05), (left + 2.3, bottom + 0.8))
    axes.plot([4.7, 5.0, 5.0], [0.6, 0.6, 6.9], color="#444444", linewidth=1)
    draw_arrow(axes, (5.0, 6.9), (5.3, 6.9))
    save(figure, "micro-batch")


def option() -> None:
    """The walk of one option, from its field to its line in the report."""
    figure, axes = canvas(10, 3.1)
    steps = (
        ("field of the config", "checked and normalized", "config.py"),
        ("Run", "decisions of one trainer", "run.py"),
        ("FEATURES", "entered in order around train()", "features/__init__.py"),
        ("report", "one line: status, path, reason", "report.py"),
        ("why_not, install", "reasons; a context that restores", "features/lora.py"),
        ("Feature.enter", "off? a reason, in any process?", "features/feature.py"),
    )
    for index, step in enumerate(steps):
        color = COLORS[2] if index == 4 else COLORS[0]
        draw_step(axes, (0.1 + 3.4 * (index % 3), 2.1 - 1.3 * (index // 3)), step, color, width=2.9)
    for start, end in ((3.0, 3.5), (6.4, 6.9)):
        draw_arrow(axes, (start, 2.5), (end, 2.5))
        draw_arrow(axes, (end, 1.2), (start, 1.2))
    draw_arrow(axes, (8.35, 2.1), (8.35, 1.6))
    draw_arrow(axes, (8.35, 0.8), (1.55, 0.8), bend=-0.12)
    axes.text(5.0, 0.22, "off, or a reason against it", ha="center", va="center", fontsize=9, color="#444444")
    save(figure, "option")


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture for light and dark pages, without its date, so that drawing again changes nothing."""
    figure.tight_layout()
    file = HERE / f"{name}.svg"
    figure.savefig(file, metadata={"Date": None}, transparent=True)
    plt.close(figure)
    text = file.read_text(encoding="utf-8").replace('<style type="text/css">', f'<style type="text/css">{DARK}', 1)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    packed_row()
    shared_prefix()
    memory_levels()
    micro_batch()
    option()
