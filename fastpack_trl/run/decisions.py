"""`Decisions`: decisions of the features of a run, for other features to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from fastpack_trl.config import Settings
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.dataset import DatasetFacts


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that keeps packed documents apart, and the reason."""

    path: str
    """A backend (``varlen``, ...), `PADDED_DOCUMENTS`, or ``off``: transformers' attention."""
    reason: str
    flattens: bool = False
    """Batches that TRL pads become rows without padding."""
    refuses_compile: str = ""
    """The reason why layers are not compiled; empty if they may be."""
    unproven: str = ""
    """The reason why batches that TRL pads stay padded although the path can flatten them; empty if they need not."""
    setting: str = ""
    """The value of `packed_attention` for which a run chose it."""


@dataclass(eq=False, repr=False)
class Decisions:
    """Decisions of the features, each made in one place when the trainer is built or a run begins.

    Attributes:
        settings: the resolved settings; defaults for a plain `SFTConfig`.
        choice: the attention path.
        plan: the kind of batches.
        facts: facts about the training data; None if it is streamed or was prepared elsewhere.
        training: `train` is running or ran last, not a separate evaluation.
        loss_is_ours: losses and metrics are computed per token, at the positions that the collator found.
        shares_prefixes: training rows hold a common beginning of documents once.
        refuses_static: returns why the installed attention cannot run over static batches of a bucket.
        experts_refuse_capture: returns why matmuls of experts cannot be recorded; empty if they can.
    """

    settings: Settings
    choice: Choice = Choice("off", "")
    plan: BatchPlan = field(default_factory=lambda: BatchPlan("stock", ""))
    facts: DatasetFacts | None = None
    training: bool = False
    loss_is_ours: bool = False
    shares_prefixes: bool = False
    refuses_static: Callable[[Bucket], str] = "TRL's attention reads the documents of each row again".format
    experts_refuse_capture: Callable[[], str] = str
    _are_fixed = False  # while steps run

    def __setattr__(self, name: str, value: Any) -> None:
        if self._are_fixed and name in DECIDED:
            raise AssertionError(f"run.{name} is decided before the first step, not in the middle of a run")
        super().__setattr__(name, value)


DECIDED = frozenset(one.name for one in fields(Decisions))
"""Names of all decisions."""
