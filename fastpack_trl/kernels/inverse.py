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
    inverse = _block_inverse(_diagonal(flat, _BLOCK))
    width = _BLOCK
    while width < size:
        # (A 0; C B)^-1 = (A^-1 0; -B^-1 C A^-1 B^-1)
        pairs = inverse.unflatten(1, (-1, 2))
        upper, under = pairs[:, :, 0], pairs[:, :, 1]
        corner = _diagonal(flat, 2 * width)[..., width:, :width]
        merged = inverse.new_zeros(*upper.shape[:2], 2 * width, 2 * width)
        merged[..., :width, :width] = upper
        merged[..., width:, width:] = under
        merged[..., width:, :width] = (under @ (corner @ upper)).neg_()
        inverse, width = merged, 2 * width
    return inverse.reshape(lower.shape)


def _diagonal(flat: Tensor, width: int) -> Tensor:
    """Return the blocks on the diagonal of (matrices, size, size) as (matrices, size / width, width, width); a view."""
    blocks = flat.unflatten(2, (-1, width)).unflatten(1, (-1, width))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _block_inverse(lower: Tensor) -> Tensor:
    # (I - L)(I + L^2)(I + L^4): exact, for L^8 is zero.
    square = lower @ lower
    eye = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device)
    inverse = eye - lower
    inverse = inverse + inverse @ square
    return inverse + inverse @ (square @ square)
