"""The pass of a delta rule's state over the chunks of a row, in torch: a few small products per chunk, one by one."""

from __future__ import annotations

import torch
from torch import Tensor


def state_pass(
    base: Tensor, left: Tensor, right: Tensor, through: Tensor, added: Tensor | None = None, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the state ``S_n`` that enters each chunk, and what is inside of it, ``inner_n = base_n + left_n S_n``.

    ``S_(n+1) = through_n S_n + right_n^T inner_n + added_n``, from zeros in the first chunk; with `reverse` it goes
    from the last chunk to the first, and ``S_(n-1)`` is what the right side makes.

    Args:
        base: (chunks, heads, tokens, v), contiguous as all of them.
        left, right: (chunks, heads, tokens, k).
        through: (chunks, heads, 1 or k, 1).
        added: (chunks, heads, k, v).
        reverse: see above.

    Returns:
        The states, (chunks, heads, k, v), and as `base`.
    """
    chunks, heads, _, key = left.shape
    inner = torch.empty_like(base)
    states = base.new_zeros(chunks + 1, heads, key, base.shape[-1])  # also what leaves the last chunk
    for step in range(chunks):
        chunk, entering, leaving = (
            (chunks - 1 - step, chunks - step, chunks - 1 - step) if reverse else (step, step, step + 1)
        )
        torch.baddbmm(base[chunk], left[chunk], states[entering], out=inner[chunk])
        torch.mul(states[entering], through[chunk], out=states[leaving]).baddbmm_(right[chunk].mT, inner[chunk])
        if added is not None:
            states[leaving].add_(added[chunk])
    return states[1:] if reverse else states[:-1], inner
