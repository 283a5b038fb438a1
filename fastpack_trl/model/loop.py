"""Functions called at a place of the trainer's loop: in every process, between what the processes do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback


@contextmanager
def called(
    trainer: Trainer,
    *,
    at_begin: Callable[[], object] | None = None,
    between_steps: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Call functions while `trainer` trains, until the context ends.

    Args:
        at_begin: called when training begins: the model is wrapped and in its place, a checkpoint is loaded.
        between_steps: called before each optimizer step but the first.
    """

    class Places(TrainerCallback):  # one for each call: transformers warns of two callbacks of one class
        stepped = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if at_begin is not None:
                at_begin()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.stepped and between_steps is not None:
                between_steps()
            self.stepped = True

    places = Places()
    trainer.add_callback(places)
    try:
        yield
    finally:
        trainer.remove_callback(places)
