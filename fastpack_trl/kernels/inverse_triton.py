# mypy: disable-error-code="no-untyped-def"
"""A Triton kernel of `fastpack_trl.kernels.inverse`: a program per matrix, row after row, the inverse in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import on_device_of


@triton.jit
def _kernel(lower, inverse, size: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * size * size
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    found = tl.where(row == column, 1.0, 0.0)
    for step in range(1, size):
        weights = tl.load(lower + first + step * size + row)  # (size, 1), zero from the diagonal on
        weights = tl.where(row < step, weights, 0.0)
        found -= tl.where(row == step, tl.sum(weights * found, axis=0)[None, :], 0.0)
    tl.store(inverse + first + row * size + column, found)


def chunk_inverse_triton(lower: Tensor) -> Tensor:
    """Compute `chunk_inverse` of fp32 matrices in one kernel, in fp32."""
    lower = lower.contiguous()
    inverse, size = torch.empty_like(lower), lower.shape[-1]
    with on_device_of(lower):
        _kernel[(lower.numel() // size**2,)](lower, inverse, size=size, num_warps=4)
    return inverse
