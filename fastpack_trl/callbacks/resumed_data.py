"""A run that resumes with another data set than the one its checkpoint was trained on says so, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import TrainerCallback

from fastpack_trl.packing.dataset import is_token_lists, rows_digest
from fastpack_trl.run import Run

logger = get_logger(__name__)

KEY = "fastpack_data_set"
"""In the states of callbacks of ``trainer_state.json``, which each checkpoint has."""
CHANGED = (
    "resume: the train data set is not that of the checkpoint, its rows are others: what is skipped is not what was "
    "trained on; give the data set of then, or train without resume_from_checkpoint"
)


class _Compares(TrainerCallback):
    def __init__(self, digest: str) -> None:
        self._digest = digest

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare with the checkpoint, whose state is loaded by now."""
        before = state.stateful_callbacks.get(KEY)
        state.stateful_callbacks[KEY] = {"rows": self._digest}
        if before is not None and before != state.stateful_callbacks[KEY]:
            logger.warning(CHANGED)


@contextmanager
def resumed_data(run: Run) -> Iterator[None]:
    """Write the digest of a map-style data set into each checkpoint, and compare it when a run resumes.

    Not where ``save_report`` is off: the saved files are then stock's.
    """
    dataset = run.trainer.train_dataset
    streamed = not (isinstance(dataset, Dataset) and is_token_lists(dataset, ("input_ids", "seq_lengths")))
    if streamed or run.settings.save_report == "off":  # a stream is read again from its beginning, never as a whole
        yield
        return
    callback = _Compares(rows_digest(dataset))
    run.trainer.add_callback(callback)
    try:
        yield
    finally:
        run.trainer.remove_callback(callback)
