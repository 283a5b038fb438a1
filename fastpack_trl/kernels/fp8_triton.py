# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.fp8`: largest magnitude, scale and cast in one pass; bytes transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch

_PER_WARP = 1024
_SIDE = 64


@triton.jit
def _quantize_kernel(
    x, factor, out, scales, width, has_factor: tl.constexpr, largest_value: tl.constexpr, least: tl.constexpr,
    columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    place = row * width + column
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if has_factor:
        values *= tl.load(factor + column, mask=inside, other=0.0)
    magnitudes = tl.where(values == values, tl.abs(values), 0.0)
    scale = tl.div_rn(tl.maximum(tl.max(magnitudes, axis=0), least), largest_value)
    values *= tl.div_rn(1.0, scale)
    clamped = tl.minimum(tl.maximum(values, -largest_value), largest_value)
    values = tl.where(values == values, clamped, values)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _transpose_kernel(x, out, rows, columns, side: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * side + tl.arange(0, side)
    column = tl.program_id(1).to(tl.int64) * side + tl.arange(0, side)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def quantize_rows_triton(
    x: Tensor, factor: Tensor | None, *, dtype: torch.dtype, largest: float, least: float
) -> tuple[Tensor, Tensor]:
    """Compute values and scales of `quantize_rows_torch` in one kernel.

    Args:
        x, factor: as there.
        dtype: of the values; one wider than FP8 shows them before the last rounding.
        largest: value of the format.
        least: smallest magnitude from which a scale is computed.
    """
    rows, columns = x.shape
    x = x.contiguous()
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(columns)
    launch(
        _quantize_kernel, (rows,),
        x, x if factor is None else factor, out, scales, columns, has_factor=factor is not None,
        largest_value=largest, least=least, columns=padded, num_warps=min(16, max(1, padded // _PER_WARP)),
    )  # fmt: skip
    return out, scales


def transposed_triton(values: Tensor) -> Tensor:
    """Transpose a matrix of one byte per value in one kernel."""
    rows, columns = values.shape
    out = torch.empty((columns, rows), dtype=values.dtype, device=values.device)
    launch(
        _transpose_kernel,
        (triton.cdiv(rows, _SIDE), triton.cdiv(columns, _SIDE)),
        values.view(torch.uint8),
        out.view(torch.uint8),
        rows,
        columns,
        side=_SIDE,
    )
    return out
