"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) over a packed row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack_trl.kernels.operators import arguments_of
from fastpack_trl.model.facts import Scan
from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.decay import differences, log_decay, masked_exp
from fastpack_trl.recurrent.recomputed import recomputed
from fastpack_trl.recurrent.solve import ChunkedRule

_EPSILON = 1e-6  # of the norm of query and key, as in transformers


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalise: bool, *fields: Any
) -> Tensor:
    """Compute `packed_delta` from the fields of `Chunks`."""
    chunks, dtype, groups = Chunks(*fields), torch.promote_types(query.dtype, torch.float32), key.shape[1]
    q, k, v, rate = (chunks.split(part, dtype) for part in (query, key, value, beta[..., None]))
    if normalise:
        q, k = (part * (part * part).sum(-1, keepdim=True).add(_EPSILON).rsqrt() for part in (q, k))
    # (chunks, key heads, heads of a key head or 1, CHUNK, size)
    q, k = q[:, :, None] * query.shape[-1] ** -0.5, k[:, :, None]
    v, rate = (part.unflatten(1, (groups, -1)) for part in (v, rate))
    sums = log_decay(g, chunks).unflatten(1, (groups, -1))
    between = differences(sums, chunks.causal[:, None, None], dtype)
    to_end = masked_exp(sums[..., -1:] - sums, chunks.to_end[:, None, None], dtype)[..., None]
    carried = masked_exp(sums, chunks.carry_in[:, None, None], dtype)[..., None]
    parts = (
        (k @ k.mT) * (between * rate), (q @ k.mT) * between, k * (carried * -rate), v * rate, q * carried, k * to_end,
        carried[..., -1:, :],
    )  # fmt: skip
    out = ChunkedRule.apply(*(part.flatten(1, 2) for part in parts), chunks.reach)
    return chunks.join(out).to(query.dtype)


def like_value(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)


def delta_flops(query: Tensor, _key: Tensor, value: Tensor, *_: Any, **_keywords: Any) -> int:
    size, width = query.shape[-1], value.shape[-1]
    return int(query.shape[0] * Scan("gated delta rule", query.shape[1], value.shape[1], size, width).flops(CHUNK))


ROW = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, bool normalise, "
_delta_rule = recomputed(delta_rule, ROW + arguments_of(Chunks), inputs=5, fake=like_value, flops=delta_flops)


def packed_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, *, normalise: bool = False
) -> Tensor:
    """Return ``o_t = q_t S_t``, ``S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - k_t e^(g_t) S_(t-1))``.

    The state is 0 at the start of each document, `query` is divided by the root of the key size.

    Args:
        query, key: (total_tokens, key heads, key size).
        value: (total_tokens, heads, value size); a key head serves ``heads / key heads`` consecutive heads.
        g: (total_tokens, heads), the logarithm of the decay.
        beta: (total_tokens, heads).
        normalise: scale query and key to length 1.

    Returns:
        (total_tokens, heads, value size) in the dtype of `query`; computed in fp32, with matmuls in TF32 on CUDA if
        `query` has 16 bits, or in float64.
    """
    return _delta_rule(query, key, value, g, beta, normalise, *chunks)
