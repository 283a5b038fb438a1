"""The check of a batch on its way into a model: it must describe the row that it came with."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch

logger = logging.getLogger(__name__)

_READ_AGAIN = (
    "position_ids were replaced, edited or cut after collation: documents are read from them, which asks the device"
)
_STOCK = "position_ids were edited after collation and no longer count up from 0: such rows run stock's attention"


class BatchCheck:
    """Check of each batch that a hook sees; drops what was derived from the batch before.

    `FastSFTTrainer` clears a batch after its step; under the stock trainer nobody does, so the next batch does.

    Attributes:
        tell: called each time that a batch does not describe its row any more; None: logged once.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[PackedBatch] | None = None
        self._told: set[str] = set()
        self.tell: Callable[[str], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchCheck, ()  # a copy of the model has seen no batch

    def accept(self, batch: PackedBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedBatch | None:
        """Compare `batch` with the arguments of the forward that it arrived in.

        Returns:
            The batch that describes the row as it arrived: `batch`, or one made again if the row was cut or its
            position ids were edited, or None if only stock's attention knows what such position ids mean.

        Raises:
            ValueError: the documents do not add up to the row, and nothing else tells them; or position ids of a row
                with shared prefixes were edited, which say no longer where documents begin.
        """
        row = kwargs.get("inputs_embeds")
        row = kwargs.get("input_ids") if row is None else row
        row = args[0] if row is None and args else row
        position_ids = kwargs.get("position_ids")
        position_ids = batch.position_ids if position_ids is None else position_ids  # not every backbone gets them
        if row is not None and not batch.describes(row, position_ids):
            # Of several sections they say where a token is in an image too; the documents are those of the batch.
            if position_ids.shape[1:] == row.shape[:2] == (1, batch.total_tokens):
                return self._seen(batch)
            if position_ids.shape != row.shape[:2]:
                raise ValueError(
                    f"packed_batch has documents of {batch.total_tokens} tokens for a row of {row.shape[1]} "
                    f"(batch of {row.shape[0]}): give one row and the PackedBatch that was collated with it"
                )
            if batch.shared is not None:
                _check_shared(batch, position_ids)
                return self._seen(batch)
            read = _read(position_ids)
            if read is None:
                self._say(_STOCK)
                return None
            if read.segment_lengths != batch.segment_lengths:  # else the same positions in another tensor
                self._say(_READ_AGAIN)
                batch = read.to(batch.device)
        return self._seen(batch)

    def _seen(self, batch: PackedBatch) -> PackedBatch:
        if self._last is None or self._last() is not batch:
            self.close()
            self._last = weakref.ref(batch)
        return batch

    def close(self) -> None:
        """Drop what was derived from the last batch."""
        if self._last is not None and (last := self._last()) is not None:
            last.clear_derived()
        self._last = None

    def _say(self, text: str) -> None:
        if self.tell is not None:
            self.tell(text)
        elif text not in self._told:
            self._told.add(text)
            logger.warning(f"packed_attention: {text}")


def _read(position_ids: Tensor) -> PackedBatch | None:
    """Return the documents of one row; None if one does not count up from 0. Synchronises with the device."""
    positions = position_ids.cpu()
    starts = (positions[0] == 0).nonzero().flatten()
    if len(positions) != 1 or not len(starts) or starts[0] != 0:
        return None
    batch = PackedBatch.from_lengths(torch.cat([starts, torch.tensor([positions.shape[1]])]).diff().tolist())
    return batch if torch.equal(positions, batch.position_ids) else None


def _check_shared(batch: PackedBatch, position_ids: Tensor) -> None:
    """Raise ValueError if these are not the positions that `batch` was made with. Synchronises with the device."""
    made, kept = batch.position_ids, batch.positions
    edited = kept is not None and not kept.matches(kept.tensor)
    if edited or position_ids.shape != made.shape or not torch.equal(position_ids.to(made.device), made):
        raise ValueError(
            "position_ids of a row whose documents share a prefix were edited or cut after collation: they alone do "
            "not tell the documents; set share_prefixes='off'"
        )
