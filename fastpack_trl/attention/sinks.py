"""Attention sinks on kernels that know none: exact, from the log-sum-exp that every flash kernel returns.

A sink is one logit per head that takes part in the softmax and has no value (gpt-oss). It adds ``exp(sink)`` to the
denominator of each row and nothing to the sum, so with ``lse' = logaddexp(lse, sink)`` the output is
``out' = out * exp(lse - lse')``. The backward of the unchanged kernel computes ``exp(scores - lse')`` and
``rowsum(dout * out')``: given `out'` and `lse'` in place of `out` and `lse` it returns exact dQ, dK and dV.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks in the denominator.

    Args:
        out: (..., tokens, heads, head_dim), of a kernel without sinks; overwritten.
        lse: (..., heads, tokens), natural logarithm.
        sinks: (heads,).
    """
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out *= torch.exp(lse - with_sink).transpose(-1, -2)[..., None].to(out.dtype)
    return out, with_sink


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return ``-sum(exp(sink - lse') * rowsum(dout * out'))`` per head; an empty tensor if there are no sinks.

    Args:
        grad_out, out: (..., tokens, heads, head_dim), as `fold_sinks` returned it.
        lse: (..., heads, tokens), as `fold_sinks` returned it.
        sinks: (heads,).
    """
    if sinks is None:
        return grad_out.new_empty(0)
    delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
    weighted = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return -weighted.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)


def pad_head(tensor: Tensor, width: int) -> Tensor:
    """Append zeros to the last dimension up to `width`: they change no score, and no value before them."""
    return F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor
