"""Tokens of the batches of some training steps, counted without asking the device before the figures are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.measure.flops import attention_pairs
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch


@dataclass(slots=True)
class TokenSums:
    """Sums over batches of one device.

    Attributes:
        capacity: positions handed to the model, padding included.
        nonpad: of these, tokens of documents. TRL's own padding-free rows do not say what `pad_to_multiple_of` added:
            there it counts as tokens.
        loss: tokens that the loss counts; None where a batch came without labels.
        spared: of these, those that lie in a row once for several documents, but for once.
        scored: positions whose logits were made.
        scored_once: of these, positions whose logits were not made again in the backward pass (`step.head`).
        pairs: query-key pairs per head by sliding window, half of each squared length (`attention_pairs`).
    """

    capacity: float = 0.0
    nonpad: float = 0.0
    spared: float = 0.0
    loss: float | None = 0.0
    scored: float = 0.0
    scored_once: float = 0.0
    pairs: dict[int | None, float] = field(default_factory=dict)

    def add(self, other: TokenSums) -> None:
        self.capacity += other.capacity
        self.nonpad += other.nonpad
        self.spared += other.spared
        self.loss = None if self.loss is None or other.loss is None else self.loss + other.loss
        self.scored += other.scored
        self.scored_once += other.scored_once
        for window, pairs in other.pairs.items():
            self.pairs[window] = self.pairs.get(window, 0.0) + pairs


class TokenCounter:
    """Counts batches as they reach the model; what only the device knows is summed there and read by `take`."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self._clear()

    def _clear(self) -> None:
        self._host = TokenSums(pairs=dict.fromkeys(self.windows, 0.0))
        self._device: dict[torch.device, Tensor] = {}

    def count(self, inputs: Mapping[str, Any]) -> None:
        """Count one batch: the keywords of a call of the model.

        A `PackedBatch` among them holds everything on the host. Of other batches shapes are read on the host, labels
        and masks are summed on their device.
        """
        ids: Any = inputs.get("input_ids")
        ids = ids if ids is not None else inputs["inputs_embeds"][..., 0]
        host, labels = self._host, inputs.get("labels")
        fused, ours = bool(inputs.get("fused_lm_head")), inputs.get("loss_batch") is not None
        # TRL's chunked loss leaves out the last position, and on CUDA scores only what the loss counts.
        at_loss = ours or (fused and ids.device.type == "cuda")
        host.capacity += ids.numel()
        host.scored += 0 if at_loss else ids.numel() - ids.shape[0] * fused
        batch: Any = inputs.get("packed_batch")
        if not isinstance(batch, PackedBatch) or not batch.describes(
            ids, inputs.get("position_ids", batch.position_ids)
        ):
            batch = None  # what arrived was cut or edited since: counted as it is
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        mask = mask if mask is not None and mask.dim() == 2 else None
        real: Tensor | None = None
        pairs: list[Tensor | None] = [None] * len(self.windows)
        if batch is not None or (mask is None and positions is None):
            lengths = batch.seq_lengths if batch is not None else [ids.shape[1]] * ids.shape[0]
            documents = batch.documents if batch is not None else None
            host.nonpad += sum(lengths) if documents is None else sum(documents.lengths)
            host.spared += 0 if documents is None else sum(documents.lengths) - sum(lengths)
            # Queries behind a prefix see it too; its own are counted where they are.
            behind = batch.shared.prefix_lengths if batch is not None and batch.shared is not None else ()
            keys = [length + prefix for length, prefix in zip(lengths, behind, strict=False)] if behind else lengths
            for window in self.windows:
                host.pairs[window] += attention_pairs(keys, window) - attention_pairs(behind, window)
        else:
            real = None if mask is None else mask.bool().sum()
            host.nonpad += ids.numel() if real is None else 0
            pairs = [*self._pairs(mask, positions)]
        if batch is None or batch.loss_positions is None or not batch.counts(labels) or host.loss is None:
            loss, device = _loss_tokens(inputs, labels), ids.device
            if loss is None:
                host.loss = None
            counted = [loss, loss if at_loss else None, loss if ours else None, real, *pairs]
            zero = torch.zeros((), dtype=torch.int64, device=device)
            sums = torch.stack([zero if value is None else value.to(torch.int64) for value in counted])
            self._device[device] = self._device[device] + sums if device in self._device else sums
            return
        count = batch.loss_positions.numel()
        host.loss += count if batch.documents is None else batch.documents.loss_tokens
        host.scored += count * at_loss
        host.scored_once += count * ours

    def _pairs(self, mask: Any, positions: Any) -> list[Tensor]:
        """Return twice the query-key pairs for each window, on the device."""
        if positions is None:
            place = mask.long().cumsum(-1)
        else:
            place = positions[0] + 1 if positions.dim() == 3 else positions + 1  # one row per axis of multimodal models
        # The i-th token of a document sees min(i, window) keys; a half less while the window is not full.
        doubled = [2 * place - 1 if w is None else 2 * place.clamp(max=w) - place.le(w).long() for w in self.windows]
        return [(pairs if mask is None else pairs * mask.bool()).sum() for pairs in doubled]

    def take(self) -> TokenSums:
        """Return the sums since the last call. One device sync: call it where the trainer reads its loss anyway."""
        sums = self._host
        for tensor in self._device.values():
            loss, scored, once, nonpad, *pairs = tensor.tolist()
            sums.loss = None if sums.loss is None else sums.loss + loss
            sums.scored += scored
            sums.scored_once += once
            sums.nonpad += nonpad
            for window, doubled in zip(self.windows, pairs, strict=True):
                sums.pairs[window] += doubled / 2
        self._clear()
        return sums


def _loss_tokens(inputs: Mapping[str, Any], labels: Tensor | None) -> Tensor | None:
    """Count the labels that are predicted: the first of each row has nothing before it."""
    if inputs.get("shift_labels") is not None:
        return inputs["shift_labels"].ne(IGNORE_INDEX).sum()
    return labels[..., 1:].ne(IGNORE_INDEX).sum() if labels is not None else None
