"""Whole training with LoRA over a base as loaded and in FP8: fastpack at its defaults otherwise, one process per side.

The runs are those of `benchmarks.side_by_side`. FP8 changes what is computed: how far the losses are apart is in the
table, and says nothing about learning (`benchmarks.fp8_accuracy` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import side_by_side
from benchmarks.command import CaseCommand
from benchmarks.readme_cells import grid
from benchmarks.side_table import Cell, cells, loss_difference, peak_cell
from benchmarks.training_rows import ROWS
from benchmarks.training_side import OURS, OURS_FP8
from fastpack_trl.bench.views import device_of

CASE = "fp8_steps"
DEFAULT_ROWS = (
    "qwen3-8b lora 4096",
    "qwen3-14b nf4 4096",
    "qwen3-8b lora 8192",
    "qwen3-14b lora 4096",
    "qwen3-0.6b lora 8192",
)
"""In the order in which they are measured: what the decision needs first."""
WORTH = 1.2
"""Ratio of tokens per second from which the feature is worth having."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row and side, and whether FP8 is worth it."""
    columns = "row | base | >tokens/s | >quartiles | >over as loaded | >loss apart | >kernels, ms | >peak, GiB"
    torch = record["versions"]["torch"]
    said = (
        f"**LoRA over a base in FP8, {device_of(record)}, torch {torch}.** *peak*: of tensors, + CUDA graphs beside it."
    )
    rows = [
        [row, *_cells(side, sides.get(OURS), sides[side])]
        for row, sides in cells(record).items()
        for side in (OURS, OURS_FP8)
        if side in sides
    ]
    return "\n".join([said, "", grid(f"{columns} | activations | frozen base", rows), "", *_decisions(record)])


def _cells(side: str, loaded: Cell | None, cell: Cell) -> Iterator[str]:
    yield "FP8" if side == OURS_FP8 else "as loaded"
    if not cell.runs:
        yield cell.failed or "-"
        yield from ["-"] * 7
        return
    run = cell.runs[0]
    yield f"{cell.rate:,.0f}"
    yield " to ".join(f"{each:,.0f}" for each in cell.quartiles)
    both = loaded is not None and bool(loaded.runs) and side == OURS_FP8
    yield f"{cell.rate / loaded.rate:.2f}" if both and loaded is not None else "-"
    apart = loss_difference(loaded, cell) if both and loaded is not None else None
    yield "-" if apart is None else f"{apart:.1e}"
    yield f"{1000 * run['profile']['busy_seconds']:,.0f}" if run["profile"] else "-"
    yield peak_cell(cell.runs)
    features = run["report"]["features"]
    yield str(features.get("activation_memory", {}).get("path", "-"))
    yield str(features.get("frozen_base", {}).get("reason", "-")).partition(":")[0]


def _decisions(record: Mapping[str, Any]) -> Iterator[str]:
    for row, sides in cells(record).items():
        loaded, fp8 = sides.get(OURS), sides.get(OURS_FP8)
        if loaded is not None and fp8 is not None and loaded.runs and fp8.runs:
            ratio = fp8.rate / loaded.rate
            yield f"{row}: at least {WORTH:g}x: {'yes' if ratio >= WORTH else 'no'} ({ratio:.2f})  "


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=DEFAULT_ROWS, sides=(OURS, OURS_FP8), tasks=side_by_side.tasks,
    settings=side_by_side.settings, table=table, alike=True,
    more=lambda parser: parser.set_defaults(unsloth="", timeout=side_by_side.TIMEOUT),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
