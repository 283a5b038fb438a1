"""The short causal convolution in front of a scan, over a packed row: no token reads one of another document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.packing.chunks import Chunks


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> Tensor:
    """Return ``y_t = bias + sum over s of weight_s x_(t-s)``, of those ``t-s`` that are in the document of ``t``.

    Computed in fp32 or more; what is kept for backward is `x` as it is.

    Args:
        x: (1, channels, total_tokens).
        weight: (channels, width); its last column is for the token itself.
        bias: (channels,).
        chunks: of the row.

    Returns:
        As `x`, in fp32 or `weight`'s dtype if that is wider.
    """
    out: Tensor = _Conv.apply(x, weight, bias, chunks.positions)
    return out


class _Conv(torch.autograd.Function):
    """By hand: autograd would keep a masked copy of `x` for each column of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        ctx.bias = None if bias is None else bias.dtype
        wide, columns = _widened(x, weight), _columns(weight)
        out = wide * columns[0] if bias is None else torch.addcmul(bias.to(wide.dtype)[:, None], wide, columns[0])
        tokens = x.shape[-1]
        for back, column in enumerate(columns[1:], 1):
            if back < tokens:
                earlier = _where(positions[back:] >= back, wide[..., : tokens - back])
                out[..., back:].addcmul_(earlier, column)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions = ctx.saved_tensors
        wide, columns = _widened(x, weight), _columns(weight)
        tokens = x.shape[-1]
        to_x = grad * columns[0]
        to_weight = [(grad * wide).sum((0, 2))]
        for back, column in enumerate(columns[1:], 1):
            if back >= tokens:
                to_weight.append(torch.zeros_like(to_weight[0]))
                continue
            later = _where(positions[back:] >= back, grad[..., back:])
            to_x[..., : tokens - back].addcmul_(later, column)
            to_weight.append((later * wide[..., : tokens - back]).sum((0, 2)))
        to_bias = None if ctx.bias is None else grad.sum((0, 2)).to(ctx.bias)
        return to_x.to(x.dtype), torch.stack(to_weight[::-1], 1).to(weight.dtype), to_bias, None


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32))


def _columns(weight: Tensor) -> list[Tensor]:
    """Return the columns of the weight, (channels, 1), that of the token itself first."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return list(wide[..., None].unbind(1))[::-1]


def _where(condition: Tensor, values: Tensor) -> Tensor:
    # Not a product with a mask: NaN of another document would go past it.
    return torch.where(condition, values, 0.0)
