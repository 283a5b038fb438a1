"""The core of a delta rule: a triangular system per chunk, and a state that passes over chunks.

One autograd function, because autograd of its steps would save each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.recurrent.recomputed import fp32_matmuls

_BLOCK = 8
"""Size of blocks inverted by a product of powers. Over a whole chunk that would be off by 1e8 if keys are alike."""


def one_by_one(device: torch.device) -> bool:
    """Return whether chunks run one by one, the least arithmetic. On a GPU each operation would be a launch."""
    return device.type == "cpu"


def chunk_inverse(lower: Tensor) -> Tensor:
    """Return ``(I + lower)^-1`` of strictly lower triangular matrices, (..., size, size) with size 8, 16, 32, ..."""
    if one_by_one(lower.device):
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
        inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False, unitriangular=True)
        return inverse.contiguous()  # the solver's is column by column
    return merged_inverse(lower)


def merged_inverse(lower: Tensor) -> Tensor:
    """Compute `chunk_inverse` from the inverses of blocks on the diagonal, merged in pairs: few, large matmuls."""
    half = lower.shape[-1] // 2
    if 2 * half == _BLOCK:  # (I - L)(I + L^2)(I + L^4): exact, since L^8 is zero
        eye, square = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device), lower @ lower
        return (eye - lower) @ (eye + square) @ (eye + square @ square)
    # (A 0; C B)^-1 = (A^-1 0; -B^-1 C A^-1 B^-1)
    upper, under = merged_inverse(torch.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = under @ (lower[..., half:, :half] @ upper).neg_()
    return torch.cat([F.pad(upper, (0, half)), torch.cat([corner, under], -1)], -2)


class ChunkedRule(torch.autograd.Function):
    """The output of a delta rule from the products of its chunks, (chunks, heads, CHUNK, ...).

    With ``T = (I + weights below the diagonal)^-1``, the tokens of a chunk write ``fresh = T write + T erase S`` into
    the state S that enters it; they read ``read S + scores fresh``, and ``through S + kept^T fresh`` leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, scores: Tensor, erase: Tensor, write: Tensor, read: Tensor, kept: Tensor,
        through: Tensor, reach: int,
    ) -> Tensor:  # fmt: skip
        with fp32_matmuls("ieee"):
            inverse = chunk_inverse(weights.tril(-1))
        erased = inverse @ erase
        states, fresh = recurrence(inverse @ write, erased, kept, through, None, reach)
        ctx.save_for_backward(inverse, scores, erased, read, kept, through, states, fresh)
        ctx.reach = reach
        return _sum(scores @ fresh, read, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, scores, erased, read, kept, through, states, fresh = ctx.saved_tensors
        # The state that leaves a chunk enters the next one: the same recurrence in reverse.
        ends = (scores.mT @ grad, kept, erased, through, read.mT @ grad)
        leaving, to_fresh = recurrence(*ends, ctx.reach)
        write = inverse.mT @ to_fresh
        # dT^-1 = -T^T dT T^T, with dT = dfresh (write + erase S)^T
        weights = (write @ fresh.mT).tril_(-1).neg_()
        to_through = (leaving * states).sum((-2, -1), keepdim=True)
        return (
            weights, grad @ fresh.mT, write @ states.mT, write, grad @ states.mT, fresh @ leaving.mT, to_through, None
        )  # fmt: skip


def recurrence(
    base: Tensor, left: Tensor, right: Tensor, through: Tensor, added: Tensor | None, reach: int
) -> tuple[Tensor, Tensor]:
    """Return ``S_n`` and ``inner_n = base_n + left_n S_n``, with ``S_(n+1) = through_n S_n + right_n^T inner_n``.

    Starts from zeros in the first chunk; with `added` in the last one, and ``S_(n-1)`` is that plus ``added_n``.

    Args:
        base: (chunks, heads, tokens, v).
        left, right: (chunks, heads, tokens, k).
        through: (chunks, heads, 1, 1).
        added: (chunks, heads, k, v).
        reach: the product of more steps in a row is zero.

    Returns:
        The states, (chunks, heads, k, v), and as `base`.
    """
    if one_by_one(base.device):
        return _chunk_by_chunk(base, left, right, through, added)
    # Doubling: add the states of the chunks 1, 2, 4, ... positions earlier.
    step = right.mT @ left
    step.diagonal(dim1=-2, dim2=-1).add_(through[..., 0])
    made = right.mT @ base
    if added is not None:
        step, made = step.flip(0), made.add_(added).flip(0)
    states = torch.zeros_like(made)
    states[1:] = made[:-1]
    over = step[1:-1]  # nothing enters the first chunk, and nothing comes after the last
    for level in range((min(reach, len(step) - 1) - 1).bit_length() if reach > 1 else 0):
        width = 1 << level
        if level:
            over = over[width // 2 :] @ over[: -(width // 2)]
        # A copy, because the source is overwritten.
        before = states[1:-width].clone()
        states[1 + width :].flatten(0, 1).baddbmm_(over.flatten(0, 1), before.flatten(0, 1))
    states = states if added is None else states.flip(0)
    return states, _sum(base, left, states)


def _chunk_by_chunk(
    base: Tensor, left: Tensor, right: Tensor, through: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    count, back = len(base), added is not None
    inner, states = torch.empty_like(base), base.new_zeros(count + 1, left.shape[1], left.shape[3], base.shape[3])
    for chunk in reversed(range(count)) if back else range(count):
        entering, leaving = states[chunk + back], states[chunk + 1 - back]
        torch.baddbmm(base[chunk], left[chunk], entering, out=inner[chunk])
        if added is None:
            torch.mul(entering, through[chunk], out=leaving)
        else:
            torch.addcmul(added[chunk], entering, through[chunk], out=leaving)
        leaving.baddbmm_(right[chunk].mT, inner[chunk])
    return states[back : count + back], inner


def _sum(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``base + left @ right``."""
    return torch.baddbmm(*(part.flatten(0, 1) for part in (base, left, right))).view_as(base)
