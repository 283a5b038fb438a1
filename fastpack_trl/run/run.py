"""`Run`: the interface between a trainer and its features. Features read the `Run` and never the report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import Trainer
from trl import SFTTrainer

from fastpack_trl.config import Settings
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.model.sharded import Ranks
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.batching import BatchPlan, plan_batches
from fastpack_trl.report import FeatureReport, Status
from fastpack_trl.run.decisions import Decisions
from fastpack_trl.run.services import StepServices

logger = get_logger(__name__)

SHARDED = "parameters are sharded while the step runs"
ONCE_SHARDED = "decided when train() begins, after FSDP has sharded the parameters; see the banner"
DEEPSPEED = "DeepSpeed's engine owns backward and step"
MERGED_ROW_TOKENS = 8192
"""Tokens of a row up to which ``merge_accumulation="auto"`` merges on CUDA: in longer rows kernels outlast launches."""

_Part = TypeVar("_Part")
PlanBatches = Callable[[Any, str, bool, str], BatchPlan]
MicroStep = Callable[[Any, Any, Any], Tensor]
"""Runs one micro-batch, forward and backward: model, inputs and the tokens of the step to a detached loss."""


class Run(Decisions):
    """The interface between a trainer and its features: decisions, the state of steps, and the report.

    Args:
        trainer: held by a weak reference.
        settings: fields of this package in its arguments.
        plan_batches: returns the kind of its batches, as `packing.batching.plan_batches` does for SFT.
        sequences: rows of a batch for each example of the data set.

    Attributes:
        step: state of the steps.
        report: the report for people.
        is_strict: `train` is entering its features, and stops if one that was enabled by name is unavailable.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings, plan_batches: PlanBatches = plan_batches, sequences: int = 1
    ) -> None:
        super().__init__(settings)
        self.plan_batches, self.sequences = plan_batches, sequences
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._parts: dict[type[Any], Any] = {}
        self.step = StepServices()
        self.report = FeatureReport()
        self._first_step = 0
        self.is_strict = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": self._trainer()}  # copies and pickles do not follow a weak reference

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _trainer=weakref.ref(state["_trainer"]))

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the run, for joint decisions."""
        return Ranks(int(self.trainer.accelerator.num_processes), self.args.ddp_timeout_delta)

    @property
    def trainer(self) -> SFTTrainer:
        """The trainer, for features that change it."""
        trainer: SFTTrainer | None = self._trainer()
        assert trainer is not None, "a feature outlived its trainer"
        return trainer

    @property
    def model(self) -> nn.Module:
        """The model that trains, wrapped by PEFT but not by accelerate."""
        return self.trainer.model

    @property
    def args(self) -> Any:
        """The trainer's `SFTConfig`, for fields of TRL."""
        return self.trainer.args

    @property
    def device(self) -> torch.device:
        """The device on which the model trains."""
        return torch.device(self.args.device)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The autocast dtype; None if the run computes in the dtype of the weights."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute as a training step does; with autocast if DeepSpeed has not cast the weights yet."""
        if self.is_deepspeed and self.compute_dtype is not None:
            return torch.autocast(self.device.type, dtype=self.compute_dtype)
        autocast: AbstractContextManager[Any] = self.trainer.accelerator.autocast()
        return autocast

    @property
    def is_sharded(self) -> bool:
        """Parameters are sharded over processes, by FSDP or ZeRO-3."""
        zero3 = resolve("transformers.integrations.is_deepspeed_zero3_enabled")
        return bool(self.trainer.is_fsdp_enabled or (self.is_deepspeed and (zero3 is None or zero3())))

    @property
    def is_deepspeed(self) -> bool:
        """DeepSpeed's engine owns backward and step, and casts the weights when training begins."""
        return bool(self.trainer.is_deepspeed_enabled)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP 2 is in use: parameters are DTensors, gathered while their module runs."""
        return bool(self.trainer.is_fsdp_enabled and self.trainer.accelerator.is_fsdp2)

    @property
    def packs(self) -> bool:
        """Batches are rows that the collator describes with a `PackedBatch`."""
        return self.plan.kind in ("packed", "padding_free")

    @property
    def attention_path(self) -> str:
        """The attention path of packed rows; ``stock`` if TRL collates the batches."""
        return self.choice.path if self.packs else "stock"

    @property
    def max_length(self) -> int | None:
        """Tokens at which rows of the data set are cut; None if they are not or the trainer has no such field."""
        return getattr(self.args, "max_length", None)

    @property
    def counts_documents(self) -> bool:
        """The data set was counted when it was prepared, as in SFT."""
        return self.plan_batches is plan_batches

    def begin_steps(self) -> None:
        """Count the steps of a `train` from here: a resumed one does not begin at 0."""
        self._first_step = self.trainer.state.global_step

    @property
    def is_in_first_step(self) -> bool:
        """No optimizer step of this `train` has ended."""
        return self.trainer.state.global_step == self._first_step

    def steps_left(self) -> StepsLeft:
        """Return the remaining steps, with as many rows as the current one."""
        state = self.trainer.state
        rows = self.step.rows or self.args.gradient_accumulation_steps
        return StepsLeft(state.max_steps - state.global_step, rows)

    def set_status(self, feature: str, status: Status, path: str, reason: str = "", holds: bool | None = None) -> None:
        """Set the line of `feature` in the report.

        Args:
            status, path, reason: as of `FeatureLine`.
            holds: whether the purpose of the feature is met, also if there is nothing to do; None: if it is on.

        Raises:
            ValueError: the purpose is not met when `train` begins, and the feature was enabled by name.
        """
        self.report.add(feature, status, path, reason)
        if self.is_strict and not (status == "on" if holds is None else holds) and self.settings.is_explicit(feature):
            raise ValueError(f"{feature}={self.settings.get(feature)!r}: {reason}; {self.remedy(feature)}")

    def disable(self, feature: str, path: str, reason: str) -> None:
        """Report and log that `feature` is off from here on."""
        remedy = f"; {self.remedy(feature)}" if self.settings.is_explicit(feature) else ""
        logger.warning(f"{feature}: {path} from here on: {reason}{remedy}")
        self.set_status(feature, "off", path, reason)
        self.report.partly.add(feature)

    def remedy(self, feature: str) -> str:
        """Return the setting with which `feature` is optional."""
        default = type(self.settings).__dataclass_fields__[feature].default
        return f"set {feature}={default!r} to train without it if it is unavailable"

    def get_state(self, kind: type[_Part]) -> _Part | None:
        """Return the object of class `kind` that a feature holds while it is on; None if it is off."""
        return self._parts.get(kind)

    def set_state(self, part: object) -> None:
        """Hold `part` for `Run.get_state`, by its class."""
        self._parts[type(part)] = part

    @contextmanager
    def keeping(self, part: object) -> Iterator[None]:
        """Hold `part` until the context ends, which restores the earlier object of its class."""
        with self.without(type(part)):
            self.set_state(part)
            yield

    @contextmanager
    def without(self, kind: type[Any]) -> Iterator[None]:
        """Hold no object of class `kind` until the context ends."""
        before = self._parts.pop(kind, None)
        try:
            yield
        finally:
            self._parts.pop(kind, None)
            if before is not None:
                self.set_state(before)
