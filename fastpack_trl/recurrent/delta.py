"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) over a packed row, and what Kimi's shares with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.decay import log_decay, masked_exp
from fastpack_trl.recurrent.state_scan import goes_one_by_one, scan_states, unit_lower_inverse


def packed_delta(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Return ``o_t = q_t S_t``, ``S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - k_t e^(g_t) S_(t-1))``.

    The state is 0 at the start of each document.

    Args:
        query, key: (total_tokens, key heads, key size), normalised and scaled; fp32 or wider.
        value: (total_tokens, heads, value size); a key head serves ``heads / key heads`` heads in a row.
        g: (total_tokens, heads), the logarithm of the decay.
        beta: (total_tokens, heads).
        chunks: of the row.

    Returns:
        (total_tokens, heads, value size) in the dtype of `query`.
    """
    dtype, groups = query.dtype, key.shape[1]
    per_group = value.shape[1] // groups
    # (chunks, key heads, 1 or heads per key head, CHUNK, size)
    q, k = (chunks.split(tensor, dtype)[:, :, None] for tensor in (query, key))
    v = chunks.split(value, dtype).unflatten(1, (groups, per_group))
    factor = chunks.split(beta[..., None], dtype).unflatten(1, (groups, per_group))
    sums = log_decay(chunks.split(g[..., None], dtype)[..., 0], chunks).unflatten(1, (groups, per_group))
    between = masked_exp(sums[..., :, None] - sums[..., None, :], chunks.causal[:, None, None], dtype)
    to_end = masked_exp(sums[..., -1:] - sums, chunks.to_end[:, None, None], dtype)[..., None]
    carried = masked_exp(sums, chunks.carry_in[:, None, None], dtype)[..., None]
    return delta_rule(
        Products(
            weights=((k @ k.mT) * between * factor).flatten(1, 2),
            scores=((q @ k.mT) * between).flatten(1, 2),
            erase=(k * (carried * factor)).flatten(1, 2),
            write=(v * factor).flatten(1, 2),
            read=(q * carried).flatten(1, 2),
            kept=(k * to_end).flatten(1, 2),
            # Of the last token: what is carried in and reaches the end.
            through=carried[..., -1:, :].flatten(1, 2),
        ),
        chunks,
    )


class Products(NamedTuple):
    """What the delta rule needs of each chunk, (chunks, heads, CHUNK, ...).

    Attributes:
        weights: ``beta_i k_i k_j`` with the decay from j to i, in (CHUNK, CHUNK); read below the diagonal.
        scores: ``q_i k_j`` with the decay from j to i, 0 above the diagonal.
        erase: ``beta k`` with the decay since the chunk began, of the document carried in.
        write: ``beta v``.
        read: ``q`` with the decay since the chunk began, of the document carried in.
        kept: ``k`` with the decay up to the end of the chunk, of the document that it ends with.
        through: (chunks, heads, 1 or key size, 1): the decay over the chunk of a document that goes on through it.
    """

    weights: Tensor
    scores: Tensor
    erase: Tensor
    write: Tensor
    read: Tensor
    kept: Tensor
    through: Tensor


def delta_rule(products: Products, chunks: Chunks) -> Tensor:
    """Return the output, (total_tokens, heads, value size): all chunks at once, then the states that enter them."""
    weights, scores, erase, write, read, kept, through = products
    size = erase.shape[-1]
    inverse = unit_lower_inverse(weights.tril(-1))
    solved = inverse @ torch.cat([erase, write], dim=-1)
    inside, state = scores @ solved, kept.mT @ solved
    # Of a state S that enters, (read - inside) S is read, and (through - state) S reaches the end.
    eye = torch.eye(size, dtype=erase.dtype, device=erase.device)
    decay = through * eye - state[..., :size]
    entering = scan_states(decay, state[..., size:], chunks.levels, goes_one_by_one(erase))
    return chunks.join(inside[..., size:] + (read - inside[..., :size]) @ entering)
