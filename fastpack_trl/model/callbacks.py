"""Callbacks that a trainer has for a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback


@contextmanager
def callbacks_added(trainer: Trainer, *callbacks: TrainerCallback) -> Iterator[None]:
    """Let `trainer` call `callbacks` after its own until the context ends."""
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            trainer.remove_callback(callback)


def during_training(trainer: Trainer, *, at_begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `at_begin` when training begins, in every process: the model is placed and a checkpoint is loaded."""

    class Begins(TrainerCallback):  # a new class for each call: transformers warns of two callbacks of one class
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_begin()

    return callbacks_added(trainer, Begins())


def callers(method: Any = None) -> Iterator[Any]:
    """Yield the `self` of each method, or of `method` alone, that is running, innermost first.

    A callback finds a trainer of TRL in this way: no event of transformers passes it.
    """
    code, frame = getattr(method, "__code__", None), inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals and code in (None, frame.f_code):
            yield frame.f_locals["self"]
        frame = frame.f_back
