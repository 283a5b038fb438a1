"""FP8 values with fp32 scales: per row, per group of columns, per tensor, per block, in plain torch.

The format is e4m3 (4 bits of exponent, 3 of mantissa; largest value 448, no infinity). A scale is the largest magnitude
of what shares it, over 448. Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels._triton import runs_triton

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = LARGEST * 2.0**-126
"""Smallest magnitude that a scale is made of: its scale and the inverse are normal fp32 numbers. So zeros stay zeros,
and what is below it keeps an absolute error of 2**-136 at most."""
BLOCK = 128


class Quantised(NamedTuple):
    """A matrix as ``values * scales``, its scales repeated over what shares them."""

    values: Tensor
    """(rows, columns) in `FP8`, contiguous."""
    scales: Tensor
    """fp32: (rows, groups), its transpose contiguous; () per tensor; (rows / 128, columns / 128) per block."""

    def dense(self) -> Tensor:
        """Return the matrix in fp32."""
        values, scales = self.values.float(), self.scales
        for dim in range(scales.dim()):
            scales = scales.repeat_interleave(values.shape[dim] // scales.shape[dim], dim)
        return values * scales

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantise_rows(x: Tensor, factor: Tensor | None = None, width: int | None = None) -> Quantised:
    """Quantise a matrix with a scale per row, or per row and group of columns.

    A value that is NaN or infinite becomes NaN and is left out of its scale (NaN), or makes it infinite.

    Args:
        x: (rows, columns), contiguous.
        factor: (columns,) fp32, multiplied into x first.
        width: columns of a group; all of them by default.

    Returns:
        Values (rows, columns), scales (rows, columns / width).
    """
    if runs_triton(x, factor):
        from benchmarks.fp8_triton import quantise_rows_triton

        return quantise_rows_triton(x, factor, width)
    return quantise_rows_torch(x, factor, width)


def quantise_rows_torch(x: Tensor, factor: Tensor | None = None, width: int | None = None) -> Quantised:
    """Compute `quantise_rows` in plain torch."""
    rows, columns = x.shape
    wide = x.float() if factor is None else x.float() * factor
    groups = wide.view(rows, -1, width or columns)
    scales, inverse = _scales(_magnitudes(groups).amax(-1))
    return Quantised(_cast(groups * inverse.unsqueeze(-1)).view(rows, columns), scales.t().contiguous().t())


def quantise_tensor(x: Tensor) -> Quantised:
    """Quantise a matrix with one scale."""
    scales, inverse = _scales(_magnitudes(x.float()).amax())
    return Quantised(_cast(x.float() * inverse), scales)


def quantise_blocks(x: Tensor) -> Quantised:
    """Quantise a matrix, of multiples of 128, with a scale per block of 128 x 128."""
    blocks = x.float().view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales, inverse = _scales(_magnitudes(blocks).amax((1, 3)))
    return Quantised(_cast(blocks * inverse[:, None, :, None]).view(x.shape), scales)


def transposed(values: Tensor) -> Tensor:
    """Return the transposed matrix, contiguous. Shape: (rows, columns) of bytes to (columns, rows)."""
    if values.is_cuda and runs_triton():
        from benchmarks.fp8_triton import transposed_triton

        return transposed_triton(values)
    return values.t().contiguous()


def _magnitudes(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs())


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and their inverses."""
    scales = largest.clamp(min=LEAST) / LARGEST
    return scales, scales.reciprocal()


def _cast(x: Tensor) -> Tensor:
    # Clamped: what rounding puts above 448 is NaN on some devices.
    return x.clamp(-LARGEST, LARGEST).to(FP8)
