"""A run that resumes with another data set than the one its checkpoint was trained on says so, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.model.changes import during_training
from fastpack_trl.packing.dataset import is_token_lists, rows_digest
from fastpack_trl.run import Run

logger = get_logger(__name__)

KEY = "fastpack_data_set"
"""In the states of callbacks of ``trainer_state.json``, which each checkpoint has."""
CHANGED = (
    "resume: the train data set is not that of the checkpoint, its rows are others: what is skipped is not what was "
    "trained on; give the data set of then, or train without resume_from_checkpoint"
)


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
    digest = {"rows": rows_digest(dataset)}

    def compare() -> None:
        """Compare with the checkpoint, whose state is loaded by now."""
        states = run.trainer.state.stateful_callbacks
        if states.get(KEY, digest) != digest:
            logger.warning(CHANGED)
        states[KEY] = digest

    with during_training(run.trainer, at_begin=compare):
        yield
