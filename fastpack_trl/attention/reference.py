"""Attention of one document in plain torch, on any device in any dtype: the oracle, and the path without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

# Operators take plain numbers; these mean "none".
NO_SOFTCAP = 0.0
NO_WINDOW = 0


def band_mask(length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (length, length) bool: causal, and at most `window` tokens back, the token itself included.

    The count of the token itself follows transformers' ``sliding_window``; flash kernels write the same window as
    ``(window - 1, 0)``.
    """
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 0 where `mask` is True and -inf elsewhere, to be added to scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the attention of one document from its scores, in fp32 or fp64; autograd differentiates it.

    Args:
        query, key, value: (1, heads, queries, head_dim); keys and values have as many heads, or a divisor of them.
        mask: (queries, keys) bool, True for the keys that a query sees.
        scale: factor of the scores.
        sinks: (heads,), one logit per head that takes part in the softmax and has no value.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        (1, heads, queries, value head_dim) in the dtype of the query, and the log-sum-exp, (1, heads, queries), in fp32
        or fp64.
    """
    dtype, groups = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    key, value = (tensor.to(dtype).repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query.to(dtype) @ key.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[None, :, None])
    return (torch.exp(scores - lse[..., None]) @ value).to(query.dtype), lse
