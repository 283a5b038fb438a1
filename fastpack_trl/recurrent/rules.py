"""The delta rules over a packed row as operators: forward and backward are one node of a graph each.

What is kept for backward is what a layer gives, in its dtype. All of its inside is made again: ten times as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.model.mixers import Scan
from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.delta import ScalarDecay, Tokens
from fastpack_trl.recurrent.kimi import ChannelDecay
from fastpack_trl.recurrent.precision import no_autocast, rounds_anyway
from fastpack_trl.recurrent.products import gradients, output

_EPSILON = 1e-6  # of the norm of query and key, in stock's functions


class _Rule:
    """One call: the tokens in chunks, in fp32 or wider, and the products of its form of decay."""

    def __init__(self, row: tuple[Tensor, ...], normalise: bool, chunks: Chunks) -> None:
        query, key, value, g, beta = row
        self.dtype, self.chunks = torch.promote_types(query.dtype, torch.float32), chunks
        self.tf32 = rounds_anyway(query.dtype)
        q, k, v, factor = (chunks.split(x, self.dtype) for x in (query, key, value, beta[..., None]))
        self._norms = [_Norm(x, size, normalise) for x, size in ((q, query.shape[-1] ** -0.5), (k, 1.0))]
        self.tokens = Tokens(q, k, v, g, factor)
        form = ScalarDecay if g.dim() == 2 else ChannelDecay
        self.form = form(self.tokens, chunks, self.tf32)

    def gradients(self, grad: Tensor) -> Tokens:
        found = gradients(self.form.products, self.chunks.split(grad, self.dtype), self.chunks.reach, self.tf32)
        tokens = self.form.gradients(found)
        query, key = (norm.gradient(part) for norm, part in zip(self._norms, tokens, strict=False))
        join = self.chunks.join
        return Tokens(join(query), join(key), join(tokens.value), tokens.g, join(tokens.beta)[..., 0])


class _Norm:
    """Gives `x` the length `size` in place, or multiplies it by `size`."""

    def __init__(self, x: Tensor, size: float, normalise: bool) -> None:
        self._x, self._size, self._normalise = x, size, normalise
        self._rate = (x * x).sum(-1, keepdim=True).add_(_EPSILON).rsqrt_().mul_(size) if normalise else size
        x.mul_(self._rate)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of what `x` was, in the place of that of what it is."""
        if self._normalise:
            along = (grad * self._x).sum(-1, keepdim=True)
            grad.addcmul_(self._x, along, value=-(self._size**-2))
        return grad.mul_(self._rate)


_ROW = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, bool normalise, " + arguments_of(Chunks)


def delta_rule_forward(*arguments: Any) -> Tensor:
    with no_autocast(arguments[0]):
        rule = _of(arguments)
        out = output(rule.form.products, rule.chunks.reach, rule.tf32)
        return rule.chunks.join(out).to(arguments[0].dtype)


def delta_rule_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    with no_autocast(grad):
        found = _of(arguments).gradients(grad)
        return tuple(part.to(given.dtype) for part, given in zip(found, arguments, strict=False))


def _of(arguments: tuple[Any, ...]) -> _Rule:
    return _Rule(arguments[:5], arguments[5], Chunks(*arguments[6:]))


def like_value(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)


def like_row(_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in arguments[:5])


def delta_flops(query: Tensor, _key: Tensor, value: Tensor, *_: Any, **_keywords: Any) -> int:
    size, width = query.shape[-1], value.shape[-1]
    return int(query.shape[0] * Scan("delta rule", query.shape[1], value.shape[1], size, width).flops(CHUNK))


def delta_gradient_flops(_grad: Tensor, *arguments: Any, **_keywords: Any) -> int:
    return 3 * delta_flops(*arguments)  # once to make it again


_forward = operator(delta_rule_forward, fake=like_value, flops=delta_flops, signature=f"({_ROW}) -> Tensor")
_backward = operator(
    delta_rule_backward, fake=like_row, flops=delta_gradient_flops,
    signature=f"(Tensor grad, {_ROW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:5], *arguments[6:-1])
        ctx.normalise, ctx.longest = arguments[5], arguments[-1]
        out: Tensor = _forward(*arguments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = _backward(grad, *saved[:5], ctx.normalise, *saved[5:], ctx.longest)
        return (*found, None, *(None for _ in Chunks._fields))


_delta_rule = differentiable("delta_rule", f"({_ROW}) -> Tensor", _DeltaRule)


def packed_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, *, normalise: bool = False
) -> Tensor:
    """Return ``o_t = q_t S_t``, ``S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - k_t e^(g_t) S_(t-1))``.

    The state is 0 at the start of each document, `query` is divided by the root of the key size.

    Args:
        query, key: (total_tokens, key heads, key size); of Kimi's rule as many heads as of `value`.
        value: (total_tokens, heads, value size); a key head serves ``heads / key heads`` heads in a row.
        g: (total_tokens, heads), the logarithm of the decay; (total_tokens, heads, key size) for a decay per channel.
        beta: (total_tokens, heads).
        chunks: of the row.
        normalise: query and key to length 1.

    Returns:
        (total_tokens, heads, value size) in the dtype of `query`; computed in fp32, of a 16-bit `query` with products
        in TF32 on CUDA, or in float64.
    """
    out: Tensor = _delta_rule(query, key, value, g, beta, normalise, *chunks)
    return out
