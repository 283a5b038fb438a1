"""Decides whether a batch describes the row that it arrives with, once per forward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch

logger = logging.getLogger(__name__)

_READ_AGAIN = "position_ids were edited after collation: documents are read from them, which synchronizes"
_STOCK = (
    "position_ids were edited after collation and no longer count up from 0: such rows run the attention of the model"
)


class BatchCheck:
    """The check of each batch that reaches a model; drops what was derived from the batch before.

    `FastSFTTrainer` clears a batch after its step; under the stock trainer nobody does, so the next batch does.

    Attributes:
        tell: called once with each kind of edit; None: it is logged.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[PackedBatch] | None = None
        self._told: set[str] = set()
        self.tell: Callable[[str], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchCheck, ()  # a copy of the model has seen no batch

    def accept(self, batch: PackedBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedBatch | None:
        """Return the batch that describes the row of a forward; None if only the model's own attention can run it.

        Documents are read again from position ids that were edited. Unedited ones are known without the device.

        Raises:
            ValueError: the row does not have the tokens of `batch`, or shares prefixes and has edited position ids.
        """
        rows = (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1])
        row = next((given for given in rows if given is not None), None)
        position_ids: Any = kwargs.get("position_ids")
        position_ids = batch.position_ids if position_ids is None else position_ids  # not every backbone gets them
        found: PackedBatch | None = batch
        if row is not None and not batch.describes(row, position_ids):
            if not row.shape[:2] == position_ids.shape[-2:] == (1, batch.total_tokens):
                raise ValueError(
                    f"packed_batch has documents of {batch.total_tokens} tokens for a row of {row.shape[1]} (batch of "
                    f"{row.shape[0]}, position_ids of shape {tuple(position_ids.shape)}): give one row, uncut, and the "
                    "PackedBatch that was collated with it"
                )
            # Position ids of several sections locate tokens in an image too; the documents are those of the batch.
            found = batch if position_ids.dim() > 2 else self._read(batch, position_ids)
        if found is not None and (self._last is None or self._last() is not found):
            self.close()
            self._last = weakref.ref(found)
        return found

    def close(self) -> None:
        """Drop what was derived from the last batch."""
        if self._last is not None and (last := self._last()) is not None:
            last.clear_derived()
        self._last = None

    def _read(self, batch: PackedBatch, position_ids: Tensor) -> PackedBatch | None:
        """Return the documents that (1, total_tokens) position ids tell. Synchronizes."""
        positions = position_ids.cpu()
        expected = PackedBatch.from_lengths(batch.seq_lengths, num_padding=batch.num_padding).position_ids
        if batch.shared is not None:
            expected = expected + torch.tensor(batch.shared.prefix_lengths)[batch.seq_idx[0].cpu().long()]
        if torch.equal(positions, expected):  # copied, not edited
            return batch
        if batch.shared is not None:
            raise ValueError(
                "position_ids of a row whose documents share a prefix were edited after collation: they alone do not "
                "tell the documents; set share_prefixes='off'"
            )
        starts = positions[0].eq(0)
        starts[0] = True
        lengths = starts.nonzero()[:, 0].diff(append=torch.tensor([len(starts)]))
        read = PackedBatch.from_lengths(lengths.tolist())
        matches = torch.equal(positions, read.position_ids)
        text = _READ_AGAIN if matches else _STOCK
        if text not in self._told:
            self._told.add(text)
            (self.tell or _log)(text)
        return read.to(batch.device) if matches else None


def _log(text: str) -> None:
    logger.warning(f"packed_attention: {text}")
