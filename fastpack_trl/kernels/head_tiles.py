"""Log-probabilities, entropies and gradients of tiles of logits: TRL's Triton kernels, and a twin in plain torch.

A tile holds whole rows of the vocabulary: products of hidden states and head, of which logits are
``softcap * tanh(logit_scale * products / softcap)``, or ``logit_scale * products`` without a softcap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TorchTiles:
    """The twin, for devices without Triton.

    TRL's functions for such devices make about twenty passes over a tile, each with a copy. This makes six passes and
    one copy: the first write to newly allocated memory takes as long as a pass.
    """

    def __init__(self, logit_scale: float, softcap: float | None) -> None:
        self._scale, self._softcap = logit_scale, softcap

    def fold(self, tile: Tensor, targets: Tensor, log_probs: Tensor, entropy: Tensor, is_top1: Tensor) -> Any:
        """Write the log-probabilities, entropies and top-1 flags of rows of logits; return what `differentiate` takes.

        Args:
            tile: (n, V) products; overwritten.
            targets: (n,) int64.
            log_probs, entropy: (n,) fp32, written: of each target, and of each distribution in nats.
            is_top1: (n,) bool, written: whether the target is the first of the most likely tokens.

        Returns:
            Probabilities (n, V) in fp32, in the memory of the tile if that is fp32; the tanh that caps logits, or None.
        """
        logits, bent = tile.float() if self._scale == 1.0 else tile.float() * self._scale, None
        if self._softcap is not None:
            bent = torch.tanh(logits / self._softcap)
            logits = self._softcap * bent
        every = logits.log_softmax(-1)
        torch.gather(every, -1, targets.unsqueeze(-1), out=log_probs.unsqueeze(-1))
        torch.eq(logits.argmax(-1), targets, out=is_top1)
        is_top1.logical_and_(log_probs == log_probs)  # a row with NaN has no maximum
        probabilities = torch.exp(every, out=tile if tile.dtype == torch.float32 else None)
        torch.sum(every.mul_(probabilities), -1, out=entropy)
        entropy.neg_()
        return probabilities, bent

    def differentiate(self, tile: Tensor, targets: Tensor, folded: Any, factors: Tensor) -> None:
        """Write the gradient with respect to a tile of products into it.

        Args:
            tile, targets: as in `fold`.
            folded: its result; overwritten.
            factors: (n,) fp32, the gradient with respect to the log-probability of each target.
        """
        # The derivative of log softmax by its logits: one at the target, less the probabilities.
        probabilities, bent = folded
        slope = probabilities.mul_(-factors.unsqueeze(-1))
        slope.scatter_add_(-1, targets.unsqueeze(-1), factors.unsqueeze(-1))
        if bent is not None:
            slope.mul_(1 - bent.square_())
        if self._scale != 1.0:
            slope.mul_(self._scale)
        if slope is not tile:
            tile.copy_(slope)


class TritonTiles:
    """TRL's Triton kernels: one pass over a tile each.

    Args:
        logit_scale, softcap: as above.
        forward, backward: TRL's kernels.
        block_size: columns that one kernel program reads at a time.
    """

    def __init__(
        self, logit_scale: float, softcap: float | None, *, forward: Any, backward: Any, block_size: int
    ) -> None:
        self._forward, self._backward, self._block_size = forward, backward, block_size
        self._options = {
            "logit_scale": logit_scale, "softcap": softcap or 1.0, "inv_t": 1.0, "HAS_SOFTCAP": softcap is not None,
            "BLOCK_SIZE": block_size,
        }  # fmt: skip

    def fold(self, tile: Tensor, targets: Tensor, log_probs: Tensor, entropy: Tensor, is_top1: Tensor) -> Any:
        """Compute `TorchTiles.fold` without overwriting the tile."""
        count, vocabulary = tile.shape
        sums = torch.zeros(5, count, device=tile.device, dtype=torch.float32)
        largest = torch.full((2, count), -torch.inf, device=tile.device, dtype=torch.float32)
        (sum_exp, x_sum_exp, sq_sum_exp, z_sum, target_logit), (running_max, max_before_target) = sums, largest
        self._forward[(count,)](
            tile, tile.stride(0), targets, running_max, sum_exp, x_sum_exp, sq_sum_exp, z_sum, max_before_target,
            target_logit, 0, vocabulary, HAS_ENTROPY=True, HAS_IS_TOP1=True, HAS_LOG_SUM_SQ_PROBS=False,
            HAS_MEAN_LOGITS=False, **self._options,
        )  # fmt: skip
        log_z = running_max + sum_exp.log()
        torch.sub(target_logit, log_z, out=log_probs)
        torch.sub(log_z, x_sum_exp / sum_exp, out=entropy)
        torch.logical_and(target_logit >= running_max, target_logit > max_before_target, out=is_top1)
        return log_z

    def differentiate(self, tile: Tensor, targets: Tensor, folded: Any, factors: Tensor) -> None:
        """Compute `TorchTiles.differentiate`."""
        count, vocabulary = tile.shape
        self._backward[(count, -(-vocabulary // self._block_size))](
            tile, tile.stride(0), targets, folded, folded, factors, folded, 0, vocabulary,
            HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, **self._options,
        )  # fmt: skip
