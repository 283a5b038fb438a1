"""A causal convolution of a few tokens over a packed row, channel by channel, with SiLU: forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """Return ``y_t = bias + sum over s of weight_s x_(t-s)``, of those ``t-s`` that are in the document of ``t``.

    Args:
        x: (total_tokens, channels).
        weight: (channels, width); its last column is for the token itself.
        bias: (channels,).
        positions: (total_tokens,), of each token in its document.
        silu: of the sum.

    Returns:
        As `x`, contiguous; computed in fp32 or wider.
    """
    out = _sum(_wide(x, weight), weight, bias, positions)
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)


def short_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, `weight` and a bias in the dtypes of the three; the last also without one."""
    wide = _wide(x, weight)
    inner = grad.to(wide.dtype)
    if silu:
        inner = torch.ops.aten.silu_backward(inner, _sum(wide, weight, bias, positions))
    columns, tokens = _columns(weight), x.shape[0]
    to_x, to_weight = inner * columns[0], [(inner * wide).sum(0)]
    for back, column in enumerate(columns[1:], 1):
        later = _where(positions[back:] >= back, inner[back:])
        to_x[: max(0, tokens - back)].addcmul_(later, column)
        to_weight.append((later * wide[: max(0, tokens - back)]).sum(0))
    to_bias = inner.sum(0).to(weight.dtype if bias is None else bias.dtype)
    return to_x.to(x.dtype), torch.stack(to_weight[::-1], 1).to(weight.dtype), to_bias


def _sum(wide: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    columns = _columns(weight)
    out = wide * columns[0] if bias is None else torch.addcmul(bias.to(wide.dtype), wide, columns[0])
    for back, column in enumerate(columns[1:], 1):
        earlier = wide[: max(0, wide.shape[0] - back)]
        out[back:].addcmul_(_where(positions[back:] >= back, earlier), column)
    return out


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32))


def _columns(weight: Tensor) -> list[Tensor]:
    """Return the columns of the weight, that of the token itself first."""
    return list(weight.to(torch.promote_types(weight.dtype, torch.float32)).unbind(1))[::-1]


def _where(condition: Tensor, values: Tensor) -> Tensor:
    # Not a product with a mask: NaN of another document would go past it.
    return torch.where(condition[:, None], values, 0.0)
