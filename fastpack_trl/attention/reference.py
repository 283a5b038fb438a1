"""Attention per document in plain torch, on any device in any dtype: the oracle, and the path without a kernel."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# A custom operator takes plain numbers; these mean "none".
NO_SOFTCAP = 0.0
NO_WINDOW = 0


class DocumentInputs(NamedTuple):
    """Inputs of attention per document, in the order of the operator's arguments."""

    query: Tensor
    """(1, num_heads, total_tokens, head_dim)."""
    key: Tensor
    """(1, num_kv_heads, total_keys, head_dim)."""
    value: Tensor
    """(1, num_kv_heads, total_keys, value head_dim)."""
    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the host."""
    sinks: Tensor | None
    """(num_heads,)."""
    band: Tensor | None
    """(most keys, most keys) additive float mask of the window; None where no segment exceeds it."""
    window: int
    scale: float
    softcap: float
    max_seqlen: int
    """At least the longest segment."""
    cu_seqlens_k: Tensor | None = None
    """(num_segments + 1,) int32 on the host: segments of the keys, whose last ones are aligned with the queries (see
    `SharedKeys`). None: each token is a query and a key."""

    @property
    def segments(self) -> list[tuple[slice, slice]]:
        """Return queries and keys of each segment; the host's tensors are read, no device is asked."""
        queries = [slice(*pair) for pair in pairwise(self.cu_seqlens.tolist())]
        if self.cu_seqlens_k is None:
            return [(part, part) for part in queries]
        keys = [slice(*pair) for pair in pairwise(self.cu_seqlens_k.tolist())]
        return list(zip(queries, keys, strict=True))


def band_mask(length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (length, length) bool: causal, and at most `window` tokens back, the token itself included.

    The count of the token itself follows transformers' ``sliding_window``; flash kernels write the same window as
    ``(window - 1, 0)``.
    """
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 0 where `mask` is True and -inf elsewhere, as scores take it."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def window_band(longest: int, window: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return `DocumentInputs.band` for segments of up to `longest` keys."""
    return additive(band_mask(longest, window, device)) if longest > window > NO_WINDOW else None


def reference_forward(inputs: DocumentInputs) -> tuple[Tensor, Tensor]:
    """Compute the scores of one segment at a time, in fp32 or fp64.

    Rows that no segment has, and those of a segment beyond `max_seqlen`, are NaN: flash kernels size their grid by it
    and leave them uninitialised.

    Returns:
        (1, total_tokens, num_heads, value head_dim), and the log-sum-exp, (1, num_heads, total_tokens), fp32 or fp64.
    """
    query, value, sinks = inputs.query, inputs.value, inputs.sinks
    out, lse = (tensor.fill_(torch.nan) for tensor in empty_output(query, value))
    for part, seen in inputs.segments:
        beyond = max(0, part.stop - part.start - inputs.max_seqlen)
        part, seen = slice(part.start, part.stop - beyond), slice(seen.start, seen.stop - beyond)
        if part.start == part.stop:
            continue
        scores, _ = _scores(inputs, part, seen)
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(total.dtype)[None, :, None])
        probabilities = torch.exp(scores - total[..., None])
        values = _repeat(value[:, :, seen], query.shape[1]).to(scores.dtype)
        out[:, part] = (probabilities @ values).transpose(1, 2).to(out.dtype)
        lse[:, :, part] = total
    return out, lse


def reference_backward(
    inputs: DocumentInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the log-sum-exp (FlashAttention-2, Dao 2023, algorithm 2).

    NaN for tokens that no segment has, and for all of a segment longer than `max_seqlen`.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    heads, kv_heads = query.shape[1], key.shape[1]
    grads = tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
    for part, seen in inputs.segments:
        if part.start == part.stop or part.stop - part.start > inputs.max_seqlen:
            continue
        scores, slope = _scores(inputs, part, seen)
        probabilities = torch.exp(scores - lse[:, :, part, None])
        upstream = grad_out[:, part].transpose(1, 2).to(scores.dtype)
        values = _repeat(value[:, :, seen], heads).to(scores.dtype)
        delta = (upstream * out[:, part].transpose(1, 2)).sum(-1, keepdim=True)
        d_scores = probabilities * (upstream @ values.transpose(-1, -2) - delta)
        d_scores = d_scores * slope * inputs.scale if slope is not None else d_scores * inputs.scale
        keys = _repeat(key[:, :, seen], heads).to(scores.dtype)
        grads[0][:, :, part] = (d_scores @ keys).to(query.dtype)
        for grad, per_head in (
            (grads[1], d_scores.transpose(-1, -2) @ query[:, :, part].to(scores.dtype)),
            (grads[2], probabilities.transpose(-1, -2) @ upstream),
        ):
            grad[:, :, seen] = per_head.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).to(grad.dtype)
    return grads[0], grads[1], grads[2]


def _scores(inputs: DocumentInputs, part: slice, seen: slice) -> tuple[Tensor, Tensor | None]:
    """Return masked scores of one segment, (1, num_heads, queries, keys), and the slope of the cap if there is one."""
    query, key = inputs.query[:, :, part], inputs.key[:, :, seen]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) @ _repeat(key, query.shape[1]).to(dtype).transpose(-1, -2)) * inputs.scale
    slope = None
    if inputs.softcap != NO_SOFTCAP:
        bounded = torch.tanh(scores / inputs.softcap)
        scores, slope = bounded * inputs.softcap, 1 - bounded.square()
    length, keys = scores.shape[-2:]
    mask = corner(inputs.band, length, inputs.window, keys - length)
    if mask is not None:
        return scores + mask, slope
    above = torch.ones(length, keys, dtype=torch.bool, device=scores.device).triu_(1 + keys - length)
    return scores.masked_fill(above, -torch.inf), slope


def empty_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for the output, (1, tokens, heads, value head_dim), and the log-sum-exp, (1, heads, tokens).

    Both lie in memory by token: a segment of either is one contiguous piece.
    """
    _, heads, total, _ = query.shape
    out = query.new_empty(1, total, heads, value.shape[-1])
    dtype = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(1, total, heads, dtype=dtype).transpose(1, 2)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def corner(band: Tensor | None, length: int, window: int, prefix: int = 0) -> Tensor | None:
    """Return the band of a segment behind a prefix: (length, prefix + length).

    None if all of it fits into the window, where plain causal attention, aligned bottom-right, is the same.
    """
    keys = prefix + length
    return None if band is None or keys <= window else band[prefix:keys, :keys]
