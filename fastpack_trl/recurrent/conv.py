"""The short causal convolution in front of a scan, over a packed row: no token reads one of another document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import differentiable, operator
from fastpack_trl.kernels.short_conv import short_conv, short_conv_backward
from fastpack_trl.packing.chunks import Chunks


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks, *, silu: bool = False) -> Tensor:
    """Return ``y_t = bias + sum over s of weight_s x_(t-s)``, of those ``t-s`` that are in the document of ``t``.

    Computed in fp32 or more; what is kept for backward is `x` as it is.

    Args:
        x: (1, channels, total_tokens).
        weight: (channels, width); its last column is for the token itself.
        bias: (channels,).
        chunks: of the row.
        silu: of the sum.

    Returns:
        As `x`, with the channels of a token beside each other.
    """
    out: Tensor = _conv(x[0].T, weight, bias, chunks.positions, silu)
    return out.T[None]


def _like_x(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_all(_grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    to_bias = weight.new_empty(weight.shape[0]) if bias is None else torch.empty_like(bias)
    return _like_x(x), _like_x(weight), to_bias


def _flops(x: Tensor, weight: Tensor, *_: Any, **_keywords: Any) -> int:
    return int(2 * x.numel() * weight.shape[1])


def _backward_flops(_grad: Tensor, *arguments: Any, **_keywords: Any) -> int:
    return 3 * _flops(*arguments)  # once to make the sum again


_forward = operator(short_conv, fake=_like_x, flops=_flops)
_backward = operator(short_conv_backward, fake=_like_all, flops=_backward_flops)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.silu = silu
        out: Tensor = _forward(x, weight, bias, positions, silu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        to_x, to_weight, to_bias = _backward(grad, *saved, ctx.silu)
        return to_x, to_weight, None if saved[2] is None else to_bias, None, None


_conv = differentiable(
    "packed_conv", "(Tensor x, Tensor weight, Tensor? bias, Tensor positions, bool silu) -> Tensor", _Conv
)
