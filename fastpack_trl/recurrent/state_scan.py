"""The two operations of the delta rule that no other of torch's is: an inverse, and a scan over the states of chunks.

Each is an operator that a compiler does not look into, with a fake kernel and a FLOP formula, and its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import differentiable, operator

_BLOCK = 8
"""Blocks of this size are inverted by a product of powers. Over a whole chunk that is right on paper, and off by 1e8
where keys are alike."""


def chunk_inverse(lower: Tensor) -> Tensor:
    """Return ``(I + lower)^-1`` of strictly lower triangular matrices, (..., size, size) with size 8, 16, 32, 64, ...

    On the CPU by torch's solver. Elsewhere from the inverses of blocks on the diagonal, merged in pairs: few products
    of many small matrices.
    """
    if lower.device.type == "cpu":
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
        inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False, unitriangular=True)
        return inverse.contiguous()  # the solver's is column by column; a graph takes the fake kernel at its word
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


def goes_one_by_one(states: Tensor) -> bool:
    """Return whether the scan takes a step per chunk: on the CPU, where work counts for more than calls."""
    return states.device.type == "cpu"


def state_scan(decay: Tensor, added: Tensor, levels: int, reverse: bool, loop: bool) -> Tensor:
    """Return the state that enters each chunk: ``S_(n+1) = decay_n S_n + added_n``, from zeros.

    With `reverse` the state comes from the other end: ``S_(n-1) = decay_n S_n + added_n``.

    Args:
        decay: (chunks, heads, k, k); zero from one document to the next.
        added: (chunks, heads, k, v).
        levels: doublings, as `Chunks.levels`.
        reverse: see above.
        loop: one product per chunk, else `levels` products of all chunks at once, which are more work and fewer calls.

    Returns:
        As `added`; zeros for the first chunk, of `reverse` the last.
    """
    chunks, heads = added.shape[:2]
    entering = torch.zeros_like(added, memory_format=torch.contiguous_format)
    if loop:
        order = range(chunks - 1, 0, -1) if reverse else range(chunks - 1)
        for chunk in order:
            into = chunk - 1 if reverse else chunk + 1
            torch.baddbmm(added[chunk], decay[chunk], entering[chunk], out=entering[into])
        return entering
    width = decay.shape[-1]
    both = torch.cat([decay, added], dim=-1)
    for level in range(levels):
        distance = 1 << level
        if distance >= chunks:
            break
        last = level == levels - 1
        columns = slice(width, None) if last else slice(None)
        earlier, later = _shifted(both, distance, reverse)
        # A chunk's decay is replaced by the product, its addition added to.
        product = later[..., :width].flatten(0, 1) @ earlier[..., columns].flatten(0, 1)
        product = product.view(chunks - distance, heads, width, -1)
        later[..., width:] += product[..., -added.shape[-1] :]
        if not last:
            later[..., :width] = product[..., :width]
    into, outof = _shifted(entering, 1, reverse)[1], _shifted(both, 1, reverse)[0]
    into.copy_(outof[..., width:])
    return entering


def _shifted(tensor: Tensor, distance: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the chunks that give, and those `distance` after them (before them) that take; views."""
    return (tensor[distance:], tensor[:-distance]) if reverse else (tensor[:-distance], tensor[distance:])


def _like(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _like_added(_decay: Tensor, added: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(added, memory_format=torch.contiguous_format)


def _inverse_flops(lower: Tensor, **_keywords: Any) -> int:
    return int(lower.numel() * lower.shape[-1] // 3)


def _scan_flops(
    decay: Tensor, added: Tensor, levels: int, _reverse: bool, loop: bool, **_keywords: Any
) -> int:  # fmt: skip
    width, values = decay.shape[-1], added.shape[-1]
    wide = 0 if loop else (levels - 1) * (width + values)
    return int(2 * decay.numel() * (values + wide))


_inverse = operator(chunk_inverse, fake=_like, flops=_inverse_flops)
_scan = operator(state_scan, fake=_like_added, flops=_scan_flops)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse: Tensor = _inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor, levels: int, loop: bool) -> Tensor:
        entering: Tensor = _scan(decay, added, levels, False, loop)
        ctx.save_for_backward(decay, entering)
        ctx.levels, ctx.loop = levels, loop
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, entering = ctx.saved_tensors
        # What leaves a chunk is what enters the next: the same scan from the other end.
        leaving = _scan(decay.mT, grad, ctx.levels, True, ctx.loop)
        return leaving @ entering.mT, leaving, None, None


unit_lower_inverse = differentiable("chunk_inverse_with_gradient", "(Tensor lower) -> Tensor", _Inverse)
"""`chunk_inverse` with its gradient."""
scan_states = differentiable(
    "state_scan_with_gradient", "(Tensor decay, Tensor added, SymInt levels, bool loop) -> Tensor", _Scan
)
"""``(decay, added, levels, loop)``: `state_scan` from the first chunk on, with its gradient."""
