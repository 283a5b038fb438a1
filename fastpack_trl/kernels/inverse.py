"""The inverse of the triangular matrix of a chunk, of which a delta rule has one per head."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 8
"""Blocks of this size are inverted by a product of powers. Over a whole chunk that is right on paper, and off by 1e8
where keys are alike."""


def chunk_inverse(lower: Tensor) -> Tensor:
    """Return ``(I + lower)^-1`` of strictly lower triangular matrices, (..., size, size) with size 8, 16, 32, 64, ...

    On the CPU by torch's solver. On other devices from the inverses of blocks on the diagonal, merged in pairs: few
    products of many small matrices.
    """
    if lower.device.type == "cpu":
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
        inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False, unitriangular=True)
        return inverse.contiguous()  # the solver's is column by column
    return merged_inverse(lower)


def merged_inverse(lower: Tensor) -> Tensor:
    """Return what `chunk_inverse` says, by blocks on any device."""
    size = lower.shape[-1]
    flat = lower.reshape(-1, size, size)
    inverse = torch.zeros_like(flat)
    blocks = _diagonal(inverse, _BLOCK)
    blocks.copy_(_block_inverse(_diagonal(flat, _BLOCK).reshape(-1, _BLOCK, _BLOCK)).view(blocks.shape))
    width = _BLOCK
    while width < size:
        # (A 0; C B)^-1 = (A^-1 0; -B^-1 C A^-1 B^-1)
        pairs = _diagonal(inverse, 2 * width)
        upper, under = pairs[..., :width, :width], pairs[..., width:, width:]
        corner = _diagonal(flat, 2 * width)[..., width:, :width]
        torch.neg(under @ (corner @ upper), out=pairs[..., width:, :width])
        width *= 2
    return inverse.view(lower.shape)


def _diagonal(flat: Tensor, width: int) -> Tensor:
    """Return the blocks on the diagonal of (matrices, size, size) as (matrices, size / width, width, width); a view."""
    blocks = flat.unflatten(2, (-1, width)).unflatten(1, (-1, width))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _block_inverse(lower: Tensor) -> Tensor:
    # (I - L)(I + L^2)(I + L^4): exact, for L^8 is zero.
    square = lower @ lower
    inverse = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device) - lower
    inverse = torch.baddbmm(inverse, inverse, square)
    return torch.baddbmm(inverse, inverse, square @ square)
