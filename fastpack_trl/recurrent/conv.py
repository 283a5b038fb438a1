"""The short causal convolution before a scan, over a packed row: no token reads a token of another document."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.recomputed import recomputed


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """Compute `packed_conv` for `x` as (total_tokens, channels), and `positions` of tokens in their documents."""
    out = _sum(*_wide(x, weight), bias, positions)
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)


def short_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of `x`, `weight` and `bias`.

    Autograd would take twice the time and 1.5 times the memory.
    """
    wide, columns = _wide(x, weight)
    inner = grad.to(wide.dtype)
    if silu:
        inner = torch.ops.aten.silu_backward(inner, _sum(wide, columns, bias, positions))
    to_x, to_weight = inner * columns[0], [(inner * wide).sum(0)]
    for back, column in enumerate(columns[1:], 1):
        later, earlier = _within(inner[back:], positions, back), slice(max(0, len(wide) - back))
        to_x[earlier].addcmul_(later, column)
        to_weight.append((later * wide[earlier]).sum(0))
    to_bias = grad.new_empty(0) if bias is None else inner.sum(0).to(bias.dtype)
    return to_x.to(x.dtype), torch.stack(to_weight[::-1], 1).to(weight.dtype), to_bias


def _wide(x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return `x` and the columns of the weight, that of the token itself first, in fp32 or wider."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return x.to(dtype), weight.to(dtype).unbind(1)[::-1]


def _sum(wide: Tensor, columns: tuple[Tensor, ...], bias: Tensor | None, positions: Tensor) -> Tensor:
    out = wide * columns[0] if bias is None else torch.addcmul(bias.to(wide.dtype), wide, columns[0])
    for back, column in enumerate(columns[1:], 1):
        out[back:].addcmul_(_within(wide[: max(0, len(wide) - back)], positions, back), column)
    return out


def _within(values: Tensor, positions: Tensor, back: int) -> Tensor:
    # Not multiplied by a mask: NaN in another document would pass it.
    return torch.where(positions[back:, None] >= back, values, 0.0)


_short_conv = recomputed(
    short_conv, "Tensor x, Tensor weight, Tensor? bias, Tensor positions, bool silu", inputs=3,
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    flops=lambda x, weight, *_, **_keywords: int(2 * x.numel() * weight.shape[1]), gradient=short_conv_backward,
)  # fmt: skip


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks, *, silu: bool = False) -> Tensor:
    """Return ``y_t = bias + sum over s of weight_s x_(t-s)`` over those ``t-s`` in the document of ``t``.

    `x` is (1, channels, total_tokens), `weight` (channels, width): its last column multiplies the token itself. The
    result, computed in fp32 or wider, has the shape of `x`, with the channels of a token contiguous.
    """
    return _short_conv(x[0].T, weight, bias, chunks.positions, silu).T[None]
