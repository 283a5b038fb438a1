"""`Decisions`: what the features of a run have decided, for each other to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastpack_trl.config import Settings
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.dataset import DatasetFacts


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that keeps packed documents apart, and the reason."""

    path: str
    """A backend (``varlen``, ...), `PADDED_DOCUMENTS`, or ``off``: stock's attention."""
    reason: str
    flattens: bool = False
    """Batches that stock pads become rows without padding."""
    refuses_compile: str = ""
    """The reason why layers are not compiled; empty where they may be."""
    unproven: str = ""
    """The reason why batches that stock pads stay so, though the path flattens them; empty where they may be."""


class Decisions:
    """Made with the trainer and when a run begins, each by one place of the package; fixed while steps run.

    Attributes:
        settings: resolved; a plain `SFTConfig` has the defaults.
        choice: the attention path.
        plan: which batches there are.
        facts: of the training data; None where it is streamed or was prepared elsewhere.
        training: `train` runs, or ran last; not an evaluation by itself.
        loss_is_ours: losses and metrics come from the positions that the collator found, per token.
        shares_prefixes: rows of the training hold what documents begin with alike once.
        refuses_static: returns why the attention that is installed cannot run over static batches of a bucket.
        experts_refuse_capture: returns why the products of experts cannot be recorded; empty where they can.
        compiles_later: layers run uncompiled in the first step, and compiled after it where that pays.
        measures_first_step: what the first step takes on the device says how long later rows may be.
    """

    _are_fixed = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.choice = Choice("off", "")
        self.plan = BatchPlan("stock", "")
        self.facts: DatasetFacts | None = None
        self.training = False
        self.loss_is_ours = self.shares_prefixes = False
        self.refuses_static: Callable[[Bucket], str] = _no_attention
        self.experts_refuse_capture: Callable[[], str] = str
        self.compiles_later = self.measures_first_step = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._are_fixed and name in DECIDED:
            raise AssertionError(f"run.{name} is decided before the first step, not in the middle of a run")
        object.__setattr__(self, name, value)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Refuse any other decision until the context ends."""
        self._are_fixed = True
        try:
            yield
        finally:
            self._are_fixed = False


def _no_attention(_: Bucket) -> str:
    return "stock's attention reads the documents of each row anew"


DECIDED = frozenset(vars(Decisions(Settings())))
"""The names of all decisions."""
