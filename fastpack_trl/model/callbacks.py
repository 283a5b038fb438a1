"""Callbacks that a trainer has for a time, and what calls them: transformers hands over no trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


def during_training(trainer: Trainer, *, at_begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `at_begin` when training begins, in every process: the model is in its place, a checkpoint is loaded."""

    class Begins(TrainerCallback):  # one for each call: transformers warns of two callbacks of one class
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_begin()

    return callbacks_added(trainer, Begins())


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
