"""Functions called at a place of the trainer's loop: in every process, between what the processes do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback


class _Places(TrainerCallback):
    def __init__(self, at_begin: Callable[[], None] | None, between_steps: Callable[[], None] | None) -> None:
        self._at_begin, self._between_steps = at_begin, between_steps
        self._stepped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._at_begin is not None:
            self._at_begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stepped and self._between_steps is not None:
            self._between_steps()
        self._stepped = True


@contextmanager
def called(
    trainer: Trainer,
    *,
    at_begin: Callable[[], None] | None = None,
    between_steps: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call functions while `trainer` trains, until the context ends.

    Args:
        at_begin: called when training begins: the model is wrapped and in its place, a checkpoint is loaded.
        between_steps: called before each optimizer step but the first.
    """
    kind = type("Places", (_Places,), {})  # transformers warns of two callbacks of one class
    places = kind(at_begin, between_steps)
    trainer.add_callback(places)
    try:
        yield
    finally:
        trainer.remove_callback(places)
