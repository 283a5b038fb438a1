"""Decays between the tokens of a chunk, from sums of logarithms that never cross documents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks


def log_decay(logs: Tensor, chunks: Chunks) -> Tensor:
    """Return the sums of the logarithms of the decays since each token's document, or its chunk, began.

    Args:
        logs: (total_tokens, heads) or (total_tokens, heads, channels), at most 0.

    Returns:
        (chunks, heads, CHUNK) or (chunks, heads, CHUNK, channels) in float64: what is taken of it are differences.
    """
    heads_last = chunks.split(logs, torch.float64).transpose(1, 2)
    return (chunks.sums @ heads_last.flatten(2)).unflatten(2, heads_last.shape[2:]).transpose(1, 2)


def log_decay_gradient(grad: Tensor, chunks: Chunks) -> Tensor:
    """Return the gradient of the logarithms that `log_decay` was given; `grad` is that of the sums."""
    heads_last = grad.double().transpose(1, 2)
    return chunks.join((chunks.sums.mT @ heads_last.flatten(2)).unflatten(2, heads_last.shape[2:]).transpose(1, 2))


def masked_exp(logs: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(logs)`` where `mask` is true, 0 elsewhere, and 0 below the square of the rounding of `dtype`.

    Masked before: differences across documents may be large, and an infinity times 0 is NaN. What has decayed so far
    is lost in any sum; its products would be denormal numbers, with which a CPU computes so slowly that the mixers of
    a row take twice as long.
    """
    wide = logs.to(dtype, copy=True).masked_fill_(~mask, -torch.inf)
    return torch.threshold_(wide, 2 * math.log(torch.finfo(dtype).eps), -torch.inf).exp_()


def differences(sums: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay from token j to token i of a chunk, (..., i, j), where `mask` is true, and 0 elsewhere."""
    return masked_exp(sums[..., :, None] - sums[..., None, :], mask, dtype)
