"""Figures and gradients of a tile of logits in plain torch, where no Triton kernel makes them.

TRL's functions for such devices take some twenty passes over a tile, each with a copy of it; here they are seven.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(
    tile: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    is_top1: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
) -> Tensor:
    """Write the figures of whole rows of logits.

    Args:
        tile: (n, V) products of hidden states and vocabulary; left as it is.
        targets: (n,) int64.
        log_probs, entropy: (n,) fp32, written: of each target, and of each distribution in nats.
        is_top1: (n,) bool, written: whether the target is the first of the most likely tokens.
        logit_scale, softcap: as of `head_loss`.

    Returns:
        Log-probabilities, (n, V) fp32: for `differentiate`.
    """
    logits, _ = _logits(tile, logit_scale, softcap)
    every = logits.log_softmax(-1)
    torch.gather(every, -1, targets.unsqueeze(-1), out=log_probs.unsqueeze(-1))
    torch.eq(logits.argmax(-1), targets, out=is_top1)
    is_top1.logical_and_(log_probs == log_probs)  # a NaN is no maximum
    torch.sum(every.exp().mul_(every), -1, out=entropy)
    entropy.neg_()
    return every


def differentiate(
    tile: Tensor,
    targets: Tensor,
    every: Tensor,
    factors: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Turn a tile of products into the gradient with respect to them, in place.

    Args:
        tile, targets: as of `fold`.
        every: its result; overwritten.
        factors: (n,) fp32, the gradient with respect to the log-probability of each target.
        logit_scale, softcap: as of `head_loss`.
    """
    # The derivative of log softmax by its logits: one at the target, less the probabilities.
    slope = every.exp_().mul_(-factors.unsqueeze(-1))
    slope.scatter_add_(-1, targets.unsqueeze(-1), factors.unsqueeze(-1))
    bent = _logits(tile, logit_scale, softcap)[1] if softcap is not None else None
    if bent is not None:
        slope.mul_(1 - bent.square_())
    tile.copy_(slope if logit_scale == 1.0 else slope.mul_(logit_scale))


def _logits(tile: Tensor, logit_scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits of products in fp32, and the tanh that caps them."""
    scaled = tile.float() if logit_scale == 1.0 else tile.float() * logit_scale
    if softcap is None:
        return scaled, None
    bent = torch.tanh(scaled / softcap)
    return softcap * bent, bent
