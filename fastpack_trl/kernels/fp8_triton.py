# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.fp8`: largest magnitude, scale and cast in one pass; bytes transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import on_device_of

_TILE = 4096
"""Values per program where a row has more than one group."""
_PER_WARP = 1024
_SIDE = 64


@triton.jit
def _quantise_kernel(
    x, factor, out, scales, rows, num_groups, width, groups_per_row: tl.constexpr, has_factor: tl.constexpr,
    largest_value: tl.constexpr, least: tl.constexpr, groups: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    column = tl.arange(0, columns)
    inside = (group < num_groups)[:, None] & (column < width)[None, :]
    place = group[:, None] * width + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    row = group // groups_per_row
    number = group % groups_per_row
    if has_factor:
        place_in_row = number[:, None] * width + column[None, :]
        values *= tl.load(factor + place_in_row, mask=inside, other=0.0)
    magnitudes = tl.where(values == values, tl.abs(values), 0.0)
    scale = tl.div_rn(tl.maximum(tl.max(magnitudes, axis=1), least), largest_value)
    values *= tl.div_rn(1.0, scale)[:, None]
    clamped = tl.minimum(tl.maximum(values, -largest_value), largest_value)
    values = tl.where(values == values, clamped, values)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)
    # Rows first: that is the order in which a product reads the scales of groups.
    tl.store(scales + number * rows + row, scale, mask=group < num_groups)


@triton.jit
def _transpose_kernel(x, out, rows, columns, side: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * side + tl.arange(0, side)
    column = tl.program_id(1).to(tl.int64) * side + tl.arange(0, side)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def quantise_rows_triton(
    x: Tensor, factor: Tensor | None, width: int | None, *, dtype: torch.dtype, largest: float, least: float
) -> tuple[Tensor, Tensor]:
    """Compute values and scales of `quantise_rows_torch` in one kernel.

    Args:
        x, factor, width: as there.
        dtype: of the values; a wider one than FP8 shows them before their last rounding.
        largest: value of the format.
        least: magnitude that a scale is made of.
    """
    rows, columns = x.shape
    x = x.contiguous()
    width = width or columns
    per_row = columns // width
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty((per_row, rows), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    groups = 1 if per_row == 1 else max(1, _TILE // padded)
    with on_device_of(x):
        _quantise_kernel[(triton.cdiv(rows * per_row, groups),)](
            x, x if factor is None else factor, out, scales, rows, rows * per_row, width,
            groups_per_row=per_row, has_factor=factor is not None, largest_value=largest, least=least,
            groups=groups, columns=padded, num_warps=min(16, max(1, groups * padded // _PER_WARP)),
        )  # fmt: skip
    return out, scales.t()


def transposed_triton(values: Tensor) -> Tensor:
    """Transpose a matrix of one byte per value in one kernel."""
    rows, columns = values.shape
    out = torch.empty((columns, rows), dtype=values.dtype, device=values.device)
    with on_device_of(values):
        _transpose_kernel[(triton.cdiv(rows, _SIDE), triton.cdiv(columns, _SIDE))](
            values.view(torch.uint8), out.view(torch.uint8), rows, columns, side=_SIDE
        )
    return out
