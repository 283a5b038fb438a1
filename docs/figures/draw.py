"""Draw the pictures of `docs/concepts.md`: ``python docs/figures/draw.py`` writes them into this folder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
COLORS = ("#4C72B0", "#DD8452", "#55A868")
GRAY = "#B8B8B8"
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


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture without its date, so that drawing again changes nothing."""
    figure.tight_layout()
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    packed_row()
    shared_prefix()
    memory_levels()
