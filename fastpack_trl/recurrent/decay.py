"""Decays between the tokens of a chunk, from sums of logarithms that never cross documents."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks


def log_decay(logs: Tensor, chunks: Chunks) -> Tensor:
    """Return the sums of the logarithms of the decays since each token's document, or its chunk, began.

    Args:
        logs: (chunks, heads, CHUNK) or (chunks, heads, CHUNK, channels), at most 0.

    Returns:
        As `logs`, in float64: what is taken of it are differences.
    """
    heads_last = logs.double().transpose(1, 2)
    return (chunks.sums @ heads_last.flatten(2)).unflatten(2, heads_last.shape[2:]).transpose(1, 2)


def masked_exp(logs: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(logs)`` where `mask` is true, 0 elsewhere, and 0 below the square of the rounding of `dtype`.

    Masked before: differences across documents may be large, and an infinity times 0 is NaN, also in backward. What
    has decayed so far is lost in any sum; its products would be denormal numbers, with which a CPU computes so slowly
    that the mixers of a row take twice as long.
    """
    wide = logs.to(dtype).masked_fill(~mask, -torch.inf)
    return F.threshold(wide, 2 * math.log(torch.finfo(dtype).eps), -torch.inf).exp()
