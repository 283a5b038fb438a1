"""The pass of a delta rule's state over the chunks of a row, in torch: chunk by chunk, or by doubling.

Chunk by chunk is the least arithmetic, in a few small operations per chunk: for a CPU. Doubling is a few large ones,
whatever the row: for a device, on which a small one takes as long as its launch.
"""

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
        if added is None:
            kept = torch.mul(states[entering], through[chunk], out=states[leaving])
        else:
            kept = torch.addcmul(added[chunk], states[entering], through[chunk], out=states[leaving])
        kept.baddbmm_(right[chunk].mT, inner[chunk])
    return states[1:] if reverse else states[:-1], inner


def state_doubling(step: Tensor, states: Tensor, leaving: Tensor | None, reach: int) -> None:
    """Add to what one chunk makes of nothing what it makes of the state that enters it, in place.

    ``states[n+1] += step_n states[n]`` from the first chunk on, ``leaving[n-1] += step_n^T leaving[n]`` from the last
    one back: both read the same products of steps, over 1, 2, 4, ... chunks.

    Args:
        step: (chunks, heads, k, k).
        states: (chunks, heads, k, v), what enters each chunk; zeros in the first. Contiguous as all of them.
        leaving: the same from the other end; zeros in the last.
        reach: the product of more steps in a row is zero.
    """
    over = step[1:-1]  # nothing enters the first chunk, and nothing comes after the last
    for level in range((min(reach, len(step) - 1) - 1).bit_length() if reach > 1 else 0):
        width = 1 << level
        if level:
            over = over[width // 2 :] @ over[: -(width // 2)]
        # Copies: what is read is written too.
        before = states[1:-width].clone().flatten(0, 1)
        states[1 + width :].flatten(0, 1).baddbmm_(over.flatten(0, 1), before)
        if leaving is not None:
            after = leaving[width:-1].clone().flatten(0, 1)
            leaving[: -1 - width].flatten(0, 1).baddbmm_(over.mT.flatten(0, 1), after)
