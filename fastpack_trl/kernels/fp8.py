"""FP8 values with fp32 scales, and products of two such matrices: quantised by one kernel, beside plain torch.

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
MULTIPLE = 16
"""Both dimensions of a matrix are multiples of it: a device reads 16 bytes at once."""
BLOCK = 128
"""Side of the square of a weight, and width of the group of a row, that have one scale where weights have blocks."""
BLOCK_MULTIPLE = 4 * BLOCK
"""Both dimensions of a weight with blocks are multiples of it: cuBLAS reads their scales four at once, and
`torch._scaled_mm` takes none that are padded to that. https://github.com/pytorch/pytorch/pull/166752"""


class Quantised(NamedTuple):
    """A matrix as ``values * scales``, its scales repeated over what shares them."""

    values: Tensor
    """(rows, columns) in `FP8`, contiguous."""
    scales: Tensor
    """fp32: (rows, groups), its transpose contiguous; () per tensor; (rows / 128, columns / 128) per block."""

    def dense(self) -> Tensor:
        """Return the matrix in fp32."""
        values, scales = self.values.float(), self.scales
        for dim, count in enumerate(scales.shape):
            if count != values.shape[dim]:
                scales = scales.repeat_interleave(values.shape[dim] // count, dim)
        return values * scales

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantise_rows(x: Tensor, factor: Tensor | None = None, width: int | None = None) -> Quantised:
    """Quantise a matrix with a scale per row, or per row and group of columns.

    A value that is NaN or infinite becomes NaN and is left out of its scale (NaN), or makes it infinite.

    Args:
        x: (rows, columns).
        factor: (columns,) fp32, multiplied into x first.
        width: columns of a group; all of them by default.

    Returns:
        Values (rows, columns), scales (rows, columns / width).
    """
    if x.numel() and runs_triton(x, factor):
        from fastpack_trl.kernels.fp8_triton import quantise_rows_triton

        return Quantised(*quantise_rows_triton(x, factor, width, dtype=FP8, largest=LARGEST, least=LEAST))
    return quantise_rows_torch(x, factor, width)


def quantise_rows_torch(x: Tensor, factor: Tensor | None = None, width: int | None = None) -> Quantised:
    """Compute `quantise_rows` in plain torch: in a graph, where a compiler joins it to what writes x."""
    rows, columns = x.shape
    wide = x.float() if factor is None else x.float() * factor
    width = width or columns
    groups = wide.reshape(rows, columns // width, width)
    scales, inverse = scales_of(magnitudes(groups).amax(-1))
    return Quantised(cast(groups * inverse.unsqueeze(-1)).view(rows, columns), scales.t().contiguous().t())


def magnitudes(x: Tensor) -> Tensor:
    """Return absolute values, 0 in place of NaN."""
    return torch.where(x.isnan(), 0.0, x.abs())


def scales_of(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales for these largest magnitudes, and their inverses."""
    # By a tensor: CUDA multiplies by the inverse of a number, which is off by a last bit.
    scales = largest.clamp(min=LEAST) / largest.new_full((), LARGEST)
    return scales, scales.reciprocal()


def cast(x: Tensor) -> Tensor:
    """Return scaled values in `FP8`."""
    # Clamped: what rounding puts above 448 is NaN on some devices.
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def transposed(values: Tensor) -> Tensor:
    """Return the transposed matrix, contiguous. Shape: (rows, columns) of bytes to (columns, rows)."""
    if values.is_cuda and runs_triton():
        from fastpack_trl.kernels.fp8_triton import transposed_triton

        return transposed_triton(values)
    return values.t().contiguous()


def scaled_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Return ``a b^T``: FP8 products on CUDA, elsewhere the reference.

    Shapes: a (rows, inner), b (columns, inner), inner and columns multiples of 16; returns (rows, columns) in `dtype`.

    Args:
        a, b: with scales per row, per tensor, or a per group of 128 columns and b per block of 128 x 128; blocks want
            inner to be a multiple of 512, CUDA 12.9 and a device of compute capability 9.
        dtype: of the result, ``bfloat16`` or ``float16`` on CUDA.
    """
    if not a.values.is_cuda:
        return scaled_product_torch(a, b, dtype)
    rows = a.values.shape[0]
    fast = b.scales.dim() < 2 or b.scales.shape[1] == 1  # in fewer bits than fp32, far below the error of FP8 values
    if not fast:  # scales change along the contraction: sums are in fp32
        a = padded(a)
    out = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scales, scale_b=b.scales.t(), out_dtype=dtype, use_fast_accum=fast
    )
    return out if len(out) == rows else out[:rows]


def failure_of_products(device: torch.device, dtype: torch.dtype) -> str:
    """Return why a device has no FP8 products with a scale per row, found by one of 16 x 16; empty where it has.

    Which scales and results it takes depends on device, CUDA and torch: no version says so alone.
    """
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    scales = torch.arange(1.0, MULTIPLE + 1, device=device)[:, None]
    rows, columns = Quantised(ones.to(FP8), scales), Quantised(ones.to(FP8), ones[:, :1].contiguous())
    try:
        out = scaled_product(rows, columns, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return "" if torch.equal(out.float(), MULTIPLE * scales * ones) else "a small product is wrong"


def padded(a: Quantised) -> Quantised:
    """Return a matrix with scales per group whose rows are a multiple of 4, as cuBLAS reads such scales.

    What is in the rows after the last is not defined.
    """
    rows = a.values.shape[0]
    more = max(4, rows + -rows % 4)
    if more == rows:
        return Quantised(a.values, a.scales.t().contiguous().t())
    values = a.values.new_empty(more, a.values.shape[1])
    scales = a.scales.new_empty(a.scales.shape[1], more).t()
    values[:rows], scales[:rows] = a.values, a.scales
    return Quantised(values, scales)


def scaled_product_torch(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_product` in fp32."""
    return (a.dense() @ b.dense().t()).to(dtype)
