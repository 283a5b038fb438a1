"""Streamed data with fewer micro-batches than an optimizer step needs: stock's loop reads them for ever.

A stream has no length, so the trainer's loop ends by `max_steps`, and every epoch counts its micro-batches anew.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from fastpack_trl.errors import UserError
from fastpack_trl.run import Run

logger = get_logger(__name__)


class ShortData:
    """Looks at the ends of the epochs of one `train`. What an epoch has is known at its end only."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = -1
        self._rows: list[Tensor] = []
        self._said = False

    def look(self, batches: list[Any]) -> None:
        """Compare the end of an epoch with that of the one before, where no step was made between: they had no more.

        Args:
            batches: micro-batches that the loop has read for a step.

        Raises:
            UserError: their rows are the same, and will be.
        """
        args, trainer = self._run.args, self._run.trainer
        needed, steps = args.gradient_accumulation_steps, trainer.state.global_step
        if not 0 < len(batches) < needed:
            return
        if self._steps != steps:  # steps were made: no row is brought from the device
            self._steps, self._rows = steps, []
            return
        rows = [batch["input_ids"].cpu() for batch in batches if "input_ids" in batch]
        last, self._rows = self._rows, rows
        message = (
            f"an epoch of train_dataset has {len(batches)} micro-batches of per_device_train_batch_size="
            f"{args.per_device_train_batch_size} rows, an optimizer step needs gradient_accumulation_steps={needed}: "
            f"no step is made; set gradient_accumulation_steps={len(batches)}, or give it more rows"
        )
        if rows and len(rows) == len(last) and all(map(torch.equal, rows, last)):
            raise UserError(message)
        if not self._said:  # a shuffled stream: packed in another order, its rows may once be enough
            self._said = True
            logger.warning(message)


def short_data(run: Run) -> AbstractContextManager[None]:
    """Look at the ends of the epochs of a run."""
    return run.keeping(ShortData(run))
