"""Callbacks and functions that a trainer calls for a time, and what calls them: transformers hands over no trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback


@contextmanager
def callbacks_added(trainer: Trainer, *callbacks: TrainerCallback) -> Iterator[None]:
    """Let `trainer` call `callbacks`, after those that it has, until the context ends."""
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            trainer.remove_callback(callback)


@contextmanager
def during_training(
    trainer: Trainer,
    *,
    at_begin: Callable[[], object] | None = None,
    between_steps: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Call functions while `trainer` trains, until the context ends: in every process, between what these do together.

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

    with callbacks_added(trainer, Places()):
        yield


def callers(method: Callable[..., Any] | None = None) -> Iterator[Any]:
    """Yield the `self` of each method that this is called from, innermost first. Frames are only looked at.

    Args:
        method: of which alone; None: of any.
    """
    code = None if method is None else method.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if (code is None and "self" in frame.f_locals) or frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back
