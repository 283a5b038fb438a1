"""transformers' attention with a dense mask, built once per batch, device, dtype and window from document lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.attention.reference import additive, band_mask
from fastpack_trl.model.facts import ModelFeatures, stock_attention
from fastpack_trl.packing.packed_batch import PackedBatch


class DenseLayer(NamedTuple):
    """The masks and the name of transformers' function, which cross a layer boundary."""

    masks: dict[int | None, Tensor]
    """Per window (None: full): (1, 1, total_tokens, total_tokens), bool for sdpa, additive float for eager."""
    implementation: str

    def attend(self, call: AttentionCall) -> Tensor:
        """Call transformers' function with the prepared mask."""
        extra: dict[str, Any] = {} if call.sinks is None else {"s_aux": call.sinks}
        if call.softcap is not None:
            extra["softcap"] = call.softcap
        mask = self.masks[call.window]
        if mask.is_floating_point():
            mask = mask.to(call.query.dtype)  # eager adds it to the scores, whose dtype must not change
        out: Tensor = stock_attention(call.module, self.implementation)(
            call.module, call.query, call.key, call.value, mask, scaling=call.scale, dropout=call.dropout, **extra
        )[0]
        return out


def stock_error(features: ModelFeatures) -> str:
    """Return how transformers' attention differs from the model's definition, or ``""``."""
    # transformers 5.17 gives gemma2 sdpa; later versions refuse it themselves.
    wrong = features.softcap and features.implementation == "sdpa"
    return "transformers' sdpa leaves out the softcap: load the model with attn_implementation='eager'" if wrong else ""


class Dense(Backend):
    """The backend ``sdpa``: every device, dtype and feature of the model's attention in transformers."""

    name = "sdpa"
    shares = True
    tried = False  # transformers' function, which belongs to a model

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        yield stock_error(features)

    def reason(self, features: ModelFeatures) -> str:
        return f"transformers' {features.implementation} with a dense mask built once per batch"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> DenseLayer:
        masks = {window: dense_mask(batch, window, device) for window in (None, *features.windows)}
        if features.implementation == "eager":  # it adds the mask to the scores
            masks = {window: additive(mask) for window, mask in masks.items()}
        return DenseLayer(masks, features.implementation)


def dense_mask(batch: PackedBatch, window: int | None, device: torch.device) -> Tensor:
    """Return (1, 1, total_tokens, total_tokens) bool: causal over segments and their prefixes, within any `window`.

    Every token sees itself, so no row is all False. Nothing is read back from a device.
    """
    segment = batch.seq_idx.to(device)[0]
    total = segment.numel()
    if batch.shared is None:
        return ((segment[:, None] == segment) & band_mask(total, window or total, device))[None, None]
    # Positions on the way through a tree of prefixes count up by one: they are distances there.
    shared, position = batch.shared.to(device), batch.position_ids.to(device)[0]
    distance = position[:, None] - position
    seen = torch.zeros(len(batch.segment_lengths), total, dtype=torch.bool, device=device)
    # All of this has sizes that the host knows.
    of_key = torch.arange(len(seen), device=device).repeat_interleave(
        shared.cu_seqlens_k.diff(), output_size=shared.key_index.numel()
    )
    seen[of_key, shared.key_index] = True
    return (seen[segment.long()] & (distance >= 0) & (distance < (window or total)))[None, None]
