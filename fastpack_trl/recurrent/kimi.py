"""Kimi's delta rule (Kimi Linear, Bailing hybrid) over a packed row: a decay for each channel of the key."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.decay import log_decay, masked_exp
from fastpack_trl.recurrent.delta import Products, delta_rule

_BLOCK = 16
"""Tokens of a sub-block. Between two, decays are split about the token before the later one, so that scores are
products of matrices; inside of one they are made channel by channel."""


def packed_kimi(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Return what `packed_delta` does with a decay per channel of the key.

    Args:
        query, key: (total_tokens, heads, key size), normalised and scaled; fp32 or wider.
        value: (total_tokens, heads, value size).
        g: (total_tokens, heads, key size), the logarithm of the decay.
        beta: (total_tokens, heads).
        chunks: of the row.

    Returns:
        (total_tokens, heads, value size) in the dtype of `query`.
    """
    dtype = query.dtype
    q, k, v, logs, factor = (chunks.split(tensor, dtype) for tensor in (query, key, value, g, beta[..., None]))
    sums = log_decay(logs, chunks)
    carried = masked_exp(sums, chunks.carry_in[:, None, :, None], dtype)
    to_end = masked_exp(sums[..., -1:, :] - sums, chunks.to_end[:, None, :, None], dtype)
    weights, scores = _scores(torch.stack([k * factor, q]), k, sums, chunks)
    products = Products(
        weights=weights, scores=scores, erase=k * factor * carried, write=v * factor, read=q * carried,
        kept=k * to_end, through=carried[..., -1:, :].mT,
    )  # fmt: skip
    return delta_rule(products, chunks)


def _scores(left: Tensor, right: Tensor, sums: Tensor, chunks: Chunks) -> Tensor:
    """Return ``left_i right_j`` with the decays from j to i, 0 above the diagonal.

    Args:
        left: (2, chunks, heads, CHUNK, size).
        right: (chunks, heads, CHUNK, size).
        sums: (chunks, heads, CHUNK, size) float64, of `log_decay`.

    Returns:
        (2, chunks, heads, CHUNK, CHUNK).
    """
    dtype = right.dtype
    rows = []
    for start in range(0, CHUNK, _BLOCK):
        own = slice(start, start + _BLOCK)
        parts = [_own_block(left[..., own, :], right[..., own, :], sums[..., own, :], chunks.causal[:, own, own])]
        if start:
            # Of the document of the token before: later ones of the block, and earlier ones of the row before it.
            pivot, seen = sums[..., start - 1 : start, :], chunks.causal[:, None, :, start - 1, None]
            since = masked_exp(sums[..., own, :] - pivot, seen[:, :, own], dtype)
            before = chunks.causal[:, None, start - 1, :start, None]
            until = masked_exp(pivot - sums[..., :start, :], before, dtype)
            parts.insert(0, (left[..., own, :] * since) @ (right[..., :start, :] * until).mT)
        if after := CHUNK - start - _BLOCK:
            parts.append(parts[-1].new_zeros(*parts[-1].shape[:-1], after))
        rows.append(torch.cat(parts, dim=-1))
    return torch.cat(rows, dim=-2)


def _own_block(left: Tensor, right: Tensor, sums: Tensor, causal: Tensor) -> Tensor:
    """Return the scores inside of one sub-block: both exponents about a token between them could be positive."""
    decays = masked_exp(sums[..., :, None, :] - sums[..., None, :, :], causal[:, None, :, :, None], right.dtype)
    decayed = right[..., None, :, :] * decays  # (chunks, heads, i, j, size)
    return (decayed @ left.movedim(0, -1)).movedim(-1, 0)
