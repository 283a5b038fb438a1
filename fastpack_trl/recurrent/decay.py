"""Decays between the tokens of a chunk, from sums of logarithms that never cross documents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks


def log_decay(logs: Tensor, chunks: Chunks) -> Tensor:
    """Sum the logarithms of decays from the start of each token's document, or of its chunk, up to the token.

    (total_tokens, heads) -> (chunks, heads, CHUNK) in float64: differences of fp32 sums would be off by 1e-4.
    """
    return chunks.split(logs, torch.float64) @ chunks.sums.mT


def masked_exp(logs: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(logs)`` where `mask` is true, else 0; results below the square of the rounding of `dtype` become 0.

    The mask comes first: differences across documents may be large, and infinity times 0 is NaN. Results that small do
    not change a sum, but their products would be denormal numbers, which double the time on a CPU.
    """
    wide = logs.to(dtype, copy=True)
    least = 2 * math.log(torch.finfo(dtype).eps)
    return wide.masked_fill_(~mask | (wide < least), -torch.inf).exp_()


def differences(sums: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay from token j to token i of a chunk, (..., i, j), where `mask` is true, else 0."""
    return masked_exp(sums[..., :, None] - sums[..., None, :], mask, dtype)
