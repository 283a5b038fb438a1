"""FP8 matrices with fp32 scales: quantization by one kernel, matmuls of two of them, and both in plain torch.

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
"""Smallest magnitude from which a scale is computed: scale and inverse are normal fp32 numbers. Zeros stay zeros, and
smaller values have an absolute error of at most 2**-136."""
MULTIPLE = 16
"""Both dimensions of a matrix must be multiples of it, because a device reads 16 bytes at once."""


class Quantized(NamedTuple):
    """A matrix as ``values * scales``."""

    values: Tensor
    """(rows, columns) in `FP8`, contiguous."""
    scales: Tensor
    """fp32: (rows, 1), or () per tensor."""

    def dense(self) -> Tensor:
        """Return the matrix in fp32."""
        return self.values.float() * self.scales


def quantize_rows(x: Tensor, factor: Tensor | None = None) -> Quantized:
    """Quantize a matrix with a scale per row.

    NaN stays NaN and does not affect its scale; an infinite value becomes NaN and makes its scale infinite.

    Args:
        x: (rows, columns).
        factor: (columns,) fp32, multiplied into x first.
    """
    if x.numel() and runs_triton(x, factor):
        from fastpack_trl.kernels.fp8_triton import quantize_rows_triton

        return Quantized(*quantize_rows_triton(x, factor, dtype=FP8, largest=LARGEST, least=LEAST))
    return quantize_rows_torch(x, factor)


def quantize_rows_torch(x: Tensor, factor: Tensor | None = None) -> Quantized:
    """Compute `quantize_rows` in plain torch."""
    wide = x.float() if factor is None else x.float() * factor
    largest = torch.where(wide.isnan(), 0.0, wide.abs()).amax(-1, keepdim=True)
    # Divide by a tensor: for a Python number CUDA multiplies by the inverse, which may differ in the last bit.
    scales = largest.clamp(min=LEAST) / largest.new_full((), LARGEST)
    # Clamp: a value that rounds to more than 448 becomes NaN on some devices.
    return Quantized((wide * scales.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8), scales)


def transposed(values: Tensor) -> Tensor:
    """Return the transposed matrix, contiguous. Shape: (rows, columns) of bytes to (columns, rows)."""
    if values.is_cuda and runs_triton():
        from fastpack_trl.kernels.fp8_triton import transposed_triton

        return transposed_triton(values)
    return values.t().contiguous()


def scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return ``a b^T``: an FP8 matmul on CUDA, the reference on other devices.

    Shapes: a (rows, inner), b (columns, inner), inner and columns multiples of 16; returns (rows, columns) in `dtype`.

    Args:
        a, b: with scales per row, or per tensor.
        dtype: of the result, ``bfloat16`` or ``float16`` on CUDA.
    """
    if not a.values.is_cuda:
        return scaled_product_torch(a, b, dtype)
    return torch._scaled_mm(  # it sums in fewer bits than fp32, far below the error of FP8 values
        a.values, b.values.t(), scale_a=a.scales, scale_b=b.scales.t(), out_dtype=dtype, use_fast_accum=True
    )


def failure_of_products(device: torch.device, dtype: torch.dtype) -> str:
    """Return why FP8 matmuls with a scale per row fail on a device, or ``""``; a 16 x 16 matmul decides.

    Support depends on device, CUDA and torch together, so no version number decides alone.
    """
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    scales = torch.arange(1.0, MULTIPLE + 1, device=device)[:, None]
    rows, columns = Quantized(ones.to(FP8), scales), Quantized(ones.to(FP8), ones[:, :1].contiguous())
    try:
        out = scaled_product(rows, columns, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return "" if torch.equal(out.float(), MULTIPLE * scales * ones) else "a small product is wrong"


def scaled_product_torch(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute `scaled_product` in fp32; it scales sums, not values, whose sums could overflow."""
    return (a.values.float() @ b.values.float().t() * (a.scales * b.scales.t())).to(dtype)
