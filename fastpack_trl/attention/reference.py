"""Attention per document in plain torch: obviously right, any device and dtype. The oracle, and the path of what no
kernel of torch knows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# A custom operator takes plain numbers; these mean "none".
NO_SOFTCAP = 0.0
NO_WINDOW = 0


def reference_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """`per_document_attention` in plain torch: scores of one segment at a time, in fp32 or fp64."""
    out, lse = empty_output(query, value)
    for start, end in _segments(cu_seqlens):
        scores, _ = _scores(query[:, :, start:end], key[:, :, start:end], band, window, scale, softcap)
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(total.dtype)[None, :, None])
        probabilities = torch.exp(scores - total[..., None])
        values = _repeat(value[:, :, start:end], query.shape[1]).to(scores.dtype)
        out[:, start:end] = (probabilities @ values).transpose(1, 2).to(out.dtype)
        lse[:, :, start:end] = total
    return out, lse


def reference_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `reference_forward` from its log-sum-exp (FlashAttention-2, Dao 2023, algorithm 2)."""
    heads, kv_heads = query.shape[1], key.shape[1]
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    for start, end in _segments(cu_seqlens):
        part = slice(start, end)
        scores, slope = _scores(query[:, :, part], key[:, :, part], band, window, scale, softcap)
        probabilities = torch.exp(scores - lse[:, :, part, None])
        upstream = grad_out[:, part].transpose(1, 2).to(scores.dtype)
        values = _repeat(value[:, :, part], heads).to(scores.dtype)
        delta = (upstream * out[:, part].transpose(1, 2)).sum(-1, keepdim=True)
        d_scores = probabilities * (upstream @ values.transpose(-1, -2) - delta)
        d_scores = d_scores * slope * scale if slope is not None else d_scores * scale
        keys = _repeat(key[:, :, part], heads).to(scores.dtype)
        grads[0][:, :, part] = (d_scores @ keys).to(query.dtype)
        for grad, per_head in (
            (grads[1], d_scores.transpose(-1, -2) @ query[:, :, part].to(scores.dtype)),
            (grads[2], probabilities.transpose(-1, -2) @ upstream),
        ):
            grad[:, :, part] = per_head.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).to(grad.dtype)
    return grads


def _scores(
    query: Tensor, key: Tensor, band: Tensor | None, window: int, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores of one segment, (1, num_heads, length, length), and the slope of the cap where there is one."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) @ _repeat(key, query.shape[1]).to(dtype).transpose(-1, -2)) * scale
    slope = None
    if softcap != NO_SOFTCAP:
        bounded = torch.tanh(scores / softcap)
        scores, slope = bounded * softcap, 1 - bounded.square()
    length = scores.shape[-1]
    mask = corner(band, length, window)
    if mask is not None:
        return scores + mask, slope
    above = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill(above, -torch.inf), slope


def empty_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output, (1, tokens, heads, value head_dim), and the log-sum-exp, (1, heads, tokens).

    Both lie in memory by token: a segment of either is one contiguous piece.
    """
    _, heads, total, _ = query.shape
    out = query.new_empty(1, total, heads, value.shape[-1])
    dtype = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(1, total, heads, dtype=dtype).transpose(1, 2)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def corner(band: Tensor | None, length: int, window: int) -> Tensor | None:
    """The band of a segment; None where the segment fits into the window and plain causal attention is the same."""
    return None if band is None or length <= window else band[:length, :length]


def segment_lengths(cu_seqlens: Tensor) -> list[int]:
    """Tokens of each segment of a host tensor: no device is asked."""
    return [end - start for start, end in _segments(cu_seqlens)]


def _segments(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cu_seqlens.tolist()))
