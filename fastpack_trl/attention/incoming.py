"""A batch on its way into a model: does it describe the row it came with, and when may the one before be dropped."""

from __future__ import annotations

import weakref
from typing import Any

from fastpack_trl.packing.packed_batch import PackedBatch


class Incoming:
    """Checks each batch that a hook sees, and drops what was derived from the one before.

    `FastSFTTrainer` clears a batch after its step; under the stock trainer nobody does, so the next batch does.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[PackedBatch] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Incoming, ()  # a copy of the model has seen no batch

    def accept(self, batch: PackedBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take `batch` with the arguments of the forward that it arrived in.

        Raises:
            ValueError: the documents do not add up to the row.
        """
        row = kwargs.get("inputs_embeds")
        row = kwargs.get("input_ids") if row is None else row
        row = args[0] if row is None and args else row
        if row is not None and tuple(row.shape[:2]) != (1, batch.total_tokens):
            raise ValueError(
                f"packed_batch has documents of {batch.total_tokens} tokens for a row of {row.shape[1]} "
                f"(batch of {row.shape[0]}): give one row and the PackedBatch that was collated with it"
            )
        previous = self._last() if self._last is not None else None
        if previous is not batch:
            self.close()
            self._last = weakref.ref(batch)

    def close(self) -> None:
        """Drop what was derived from the last batch."""
        previous = self._last() if self._last is not None else None
        if previous is not None:
            previous.clear_derived()
        self._last = None
