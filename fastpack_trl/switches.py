"""The features that `FastSFTTrainer` installs around a run, beside its attention and its batches, in order.

A switch is a context manager over the trainer: entering installs what helps on this model and machine and writes its
line of the report, leaving restores. It reads the trainer and decides; the work is done in the room of the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Switch = Callable[[Any], AbstractContextManager[None]]

SWITCHES: tuple[Switch, ...] = ()
"""Entered from first to last when `train`, `evaluate` or `predict` begins, left in the opposite order."""


def setting_of(trainer: Any, name: str) -> str:
    """The value of a field of `FastSFTConfig`; ``auto`` where the trainer was given a plain `SFTConfig`."""
    return str(getattr(trainer.args, name, "auto"))
