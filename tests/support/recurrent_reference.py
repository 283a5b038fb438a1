"""What recurrent layers compute, token by token and document by document, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def by_document(function: Callable[..., Tensor], lengths: tuple[int, ...], *tokens: Tensor) -> Tensor:
    """Return ``function(*tokens)`` of each document by itself, joined; `tokens` have (total_tokens, ...)."""
    parts = zip(*(tensor.split(lengths) for tensor in tokens), strict=True)
    return torch.cat([function(*part) for part in parts])


def conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution of one document, (tokens, channels); the last column of `weight` is the token's."""
    padded = F.pad(x.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])[0].T


def delta_reference(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return ``o_t = q_t S_t`` with ``S_t = decay_t S_(t-1) + beta_t k_t (v_t - k_t decay_t S_(t-1))`` of one document.

    All have (tokens, heads, ...); `query` and `key` are neither normalised nor scaled here, `g` is log decay.
    """
    state, decay, outs = key.new_zeros(*key.shape[1:], value.shape[-1]), g.exp()[..., None, None], []
    for q, k, v, d, b in zip(query, key, value, decay, beta, strict=True):
        state = state * d
        correction = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[..., None] * correction[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs)


def ssd_reference(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``y_t = c_t S_t`` with ``S_t = exp(a_t) S_(t-1) + b_t x_t`` of one document (Mamba-2 without ``D x``).

    All have (tokens, heads, ...); `x` is multiplied by its time step, `a` is the logarithm of the decay.
    """
    state, outs = x.new_zeros(x.shape[1], b.shape[-1], x.shape[-1]), []
    for token, log_decay, into, out_of in zip(x, a, b, c, strict=True):
        state = state * log_decay.exp()[:, None, None] + into[..., None] * token[:, None]
        outs.append(torch.einsum("hn,hnp->hp", out_of, state))
    return torch.stack(outs)
