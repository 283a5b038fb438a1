"""Figures and gradients of a tile of logits in plain torch, where no Triton kernel makes them.

TRL's functions for such devices take some twenty passes over a tile, each with a copy of it; here they are six, with
one. The first write to memory that was just allocated takes as long as a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Folded(NamedTuple):
    """What `fold` leaves for `differentiate`."""

    probabilities: Tensor
    """(n, V) fp32; the memory of the tile where that is fp32."""
    bent: Tensor | None
    """(n, V) fp32, the tanh that caps logits; None without a softcap."""


def fold(
    tile: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    is_top1: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
) -> Folded:
    """Write the figures of whole rows of logits.

    Args:
        tile: (n, V) products of hidden states and vocabulary; overwritten.
        targets: (n,) int64.
        log_probs, entropy: (n,) fp32, written: of each target, and of each distribution in nats.
        is_top1: (n,) bool, written: whether the target is the first of the most likely tokens.
        logit_scale, softcap: as of `head_loss`.
    """
    logits, bent = _logits(tile, logit_scale, softcap)
    every = logits.log_softmax(-1)
    torch.gather(every, -1, targets.unsqueeze(-1), out=log_probs.unsqueeze(-1))
    torch.eq(logits.argmax(-1), targets, out=is_top1)
    is_top1.logical_and_(log_probs == log_probs)  # a NaN is no maximum
    probabilities = torch.exp(every, out=tile if tile.dtype == torch.float32 else None)
    torch.sum(every.mul_(probabilities), -1, out=entropy)
    entropy.neg_()
    return Folded(probabilities, bent)


def differentiate(tile: Tensor, targets: Tensor, folded: Folded, factors: Tensor, *, logit_scale: float) -> None:
    """Write the gradient with respect to a tile of products into it.

    Args:
        tile, targets: as of `fold`.
        folded: its result; overwritten.
        factors: (n,) fp32, the gradient with respect to the log-probability of each target.
        logit_scale: as of `head_loss`.
    """
    # The derivative of log softmax by its logits: one at the target, less the probabilities.
    slope = folded.probabilities.mul_(-factors.unsqueeze(-1))
    slope.scatter_add_(-1, targets.unsqueeze(-1), factors.unsqueeze(-1))
    if folded.bent is not None:
        slope.mul_(1 - folded.bent.square_())
    if logit_scale != 1.0:
        slope.mul_(logit_scale)
    if slope is not tile:
        tile.copy_(slope)


def _logits(tile: Tensor, logit_scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits of products in fp32, and the tanh that caps them."""
    scaled = tile.float() if logit_scale == 1.0 else tile.float() * logit_scale
    if softcap is None:
        return scaled, None
    bent = torch.tanh(scaled / softcap)
    return softcap * bent, bent
