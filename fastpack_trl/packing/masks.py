"""Masks made from a `PackedBatch`, each at most once per batch, device and window."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch


def band_mask(length: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (length, length) bool: causal, and at most `window` tokens back, the token itself included.

    The count of the token itself follows transformers' ``sliding_window``; flash kernels write the same window as
    ``(window - 1, 0)``.
    """
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def shared_band_mask(batch: PackedBatch, window: int, device: torch.device) -> Tensor | None:
    """Return the band for the longest segment of the batch; shorter segments use its upper left corner.

    ``None`` where no segment is longer than the window: plain causal attention is the same then.
    """
    if batch.max_seqlen <= window:
        return None
    return batch.derive(("band", window, device), lambda: band_mask(batch.max_seqlen, window, device))


def dense_mask(batch: PackedBatch, window: int | None, device: torch.device, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return (1, 1, total_tokens, total_tokens): block-diagonal over segments, causal, windowed if `window` is given.

    Bool (True: attend) for SDPA; a float dtype gives the additive form (0 or -inf) for the scores of transformers'
    eager functions. Every token sees itself, so no row is all -inf.
    """

    def boolean() -> Tensor:
        # int32 segments and positions from the batch; nothing is read back from a device.
        segment = batch.seq_idx.to(device)[0]
        mask = segment[:, None] == segment
        total = segment.numel()
        return (mask & band_mask(total, window or total, device))[None, None]

    if dtype == torch.bool:
        return batch.derive(("dense", window, device), boolean)

    def additive() -> Tensor:
        allowed = dense_mask(batch, window, device)
        return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)

    return batch.derive(("dense", window, device, dtype), additive)
