"""`Run`: the decisions of a trainer about its runs. Every feature reads a `Run`, and none reads the report."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl import SFTTrainer

from fastpack_trl.config import Settings
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.model.ranks import PATIENCE, Ranks
from fastpack_trl.model.upstream import found
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.dataset import DatasetFacts
from fastpack_trl.report import FeatureReport, Status

logger = get_logger(__name__)

PADDED_ROWS = "padded_rows"
"""The attention path that unpacks documents into padded rows, under stock's own attention."""
SHARDED = "parameters are sharded while the step runs"
ONCE_PARTED = "decided when train() begins, once FSDP has parted the parameters; its banner says what"
DEEPSPEED = "DeepSpeed's engine owns backward and step"
MERGED_ROW_TOKENS = 8192
"""Tokens of a row up to which ``merge_accumulation`` merges on CUDA by itself: beyond, kernels outlast launches."""

_Part = TypeVar("_Part")
MicroStep = Callable[[Any, Any, Any], Tensor]
"""Runs one micro-batch, forward and backward: model, inputs and the tokens of the step to a detached loss."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that keeps packed documents apart, and the reason."""

    path: str
    """A backend (``varlen``, ...), ``padded_rows``, or ``off``: stock's attention."""
    reason: str
    flattens: bool = False
    """Batches that stock pads become rows without padding."""
    refuses_compile: str = ""
    """The reason why layers are not compiled; empty where they may be."""
    unproven: str = ""
    """The reason why batches that stock pads stay so, though the path flattens them; empty where they may be."""


class Run:
    """The decisions of a trainer: made with the trainer, changed only where a decision changes.

    Args:
        trainer: which is not kept alive.
        settings: ours of its arguments.

    Attributes:
        settings: resolved; a plain `SFTConfig` has the defaults.
        report: what people read of all this.
        choice: the attention path.
        plan: which batches there are.
        facts: of the training data; None where it is streamed or was prepared elsewhere.
        training: `train` runs, or ran last; not an evaluation by itself.
        insists: `train` is entering its features: what was switched on by name and does not hold stops it.
        loss_is_ours: losses and metrics come from the positions that the collator found, per token.
        activations_left: bytes that the plan of the activations leaves of its budget, 0 where it has a layer recomputed
            for want of memory; None without such a plan. Copies of frozen weights take of it, then CUDA graphs.
        step_bytes: what activations take in a step by that plan: a CUDA graph holds as much once more.
        spares: free memory that is worth less than what any layer keeps, when a step ran out of it; False for none.
        refuses_static: returns why the attention that is installed cannot run over static batches of a bucket.
        alone_from: tokens of a document from which attention over a row of it alone is faster; infinite: never.
        parameters: returns those of the model; from a list while something keeps one.
        expert_dtypes: in which experts that transformers dispatches are computed; empty without any.
        offloads: layer inputs go to host memory.
        version: grows whenever layers begin to run otherwise (compiled, kept, offloaded): see `changed`.
        rows_of_step: rows that the micro-batches of the present step run as, merged or not; 0 before any.
        seconds: host time of what is done once, by name: ``proof`` and ``plan`` before the first step, ``compile`` in
            it or in the second.
        in_first_step: no optimizer step of this `train` has ended.
        compiles_later: layers run uncompiled in the first step, and compiled after it where that pays.
        measures_first_step: what the first step takes on the device says how long later rows may be.
        waiting: each says whether something is still to be decided in the first steps.
        undo: called before a micro-batch that may run twice; what each returns takes the first attempt back.
    """

    def __init__(self, trainer: SFTTrainer, settings: Settings) -> None:
        self._trainer = weakref.ref(trainer)
        self._parts: dict[type[Any], Any] = {}
        self.settings = settings
        self.report = FeatureReport()
        self.choice = Choice("off", "")
        self.plan = BatchPlan("stock", "")
        self.facts: DatasetFacts | None = None
        self.training = False
        self.insists = False
        self.loss_is_ours = False
        self.activations_left: int | None = None
        self.step_bytes = 0
        self.spares: list[Callable[[], bool]] = []
        self.refuses_static: Callable[[Bucket], str] = _no_attention
        self.alone_from = math.inf
        self.parameters: Callable[[], Iterable[nn.Parameter]] = self._walk
        self.expert_dtypes: set[torch.dtype] = set()
        self.offloads = False
        self.version = 0
        self.rows_of_step = 0
        self.seconds: dict[str, float] = {}
        self.in_first_step = False
        self.compiles_later = self.measures_first_step = False
        self.waiting: list[Callable[[], bool]] = []
        self.undo: list[Callable[[], Callable[[], None]]] = []

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the run, for what they decide together."""
        return Ranks(int(self.trainer.accelerator.num_processes), self.args.ddp_timeout_delta)

    @property
    def trainer(self) -> SFTTrainer:
        """Stock's interface, for what a feature does to the run."""
        trainer = self._trainer()
        assert trainer is not None, "a feature outlived its trainer"
        return trainer

    @property
    def model(self) -> nn.Module:
        """The model that trains, as PEFT wrapped it and before accelerate does."""
        return self.trainer.model

    @property
    def args(self) -> Any:
        """The trainer's `SFTConfig`, for stock's own fields."""
        return self.trainer.args

    def _walk(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()

    @property
    def device(self) -> torch.device:
        """The device on which the model trains."""
        return torch.device(self.args.device)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The autocast dtype; None where the run computes in the dtype of the weights."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute as a training step does; of weights that DeepSpeed has yet to cast that is autocast."""
        if self.is_deepspeed and self.compute_dtype is not None:
            return torch.autocast(self.device.type, dtype=self.compute_dtype)
        autocast: AbstractContextManager[Any] = self.trainer.accelerator.autocast()
        return autocast

    @property
    def is_sharded(self) -> bool:
        """Parameters are in pieces on several processes: of FSDP, or of ZeRO-3."""
        zero3 = found("transformers.integrations.is_deepspeed_zero3_enabled")
        return bool(self.trainer.is_fsdp_enabled or (self.is_deepspeed and (zero3 is None or zero3())))

    @property
    def is_deepspeed(self) -> bool:
        """DeepSpeed's engine owns backward and step, and casts the weights when training begins."""
        return bool(self.trainer.is_deepspeed_enabled)

    @property
    def is_fsdp2(self) -> bool:
        """Parameters are DTensors but while their unit runs: whole tensors then, of this process."""
        return bool(self.trainer.is_fsdp_enabled and self.trainer.accelerator.is_fsdp2)

    def together_if_parted(self) -> AbstractContextManager[None]:
        """Run a parted model in the context: all processes leave it alike, as of `Ranks.together`."""
        return self.ranks.together(PATIENCE) if self.is_fsdp2 else nullcontext()

    @property
    def packs(self) -> bool:
        """Batches are rows that the collator describes with a `PackedBatch`."""
        return self.plan.kind != "stock"

    @property
    def attention_path(self) -> str:
        """The attention that runs on packed rows; ``stock`` where batches are stock's."""
        return self.choice.path if self.packs else "stock"

    @property
    def has_settled(self) -> bool:
        """Nothing is left that the first steps decide: what compiles, which rows are merged."""
        return not any(waits() for waits in self.waiting)

    @contextmanager
    def waiting_for(self, waits: Callable[[], bool]) -> Iterator[None]:
        """Count `waits` among what is to be decided, until the context ends."""
        self.waiting.append(waits)
        try:
            yield
        finally:
            self.waiting.remove(waits)

    @contextmanager
    def taking(self, name: str) -> Iterator[None]:
        """Add the host time of the context to `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def steps_left(self) -> StepsLeft:
        """Return what is left of the run, in steps as the present one."""
        state = self.trainer.state
        rows = self.rows_of_step or self.args.gradient_accumulation_steps
        return StepsLeft(state.max_steps - state.global_step, rows)

    def changed(self) -> None:
        """Say that layers run otherwise from now on: what was recorded of them is of before."""
        self.version += 1

    def spare(self) -> bool:
        """Free memory that is worth less than what any layer keeps; False where there is none."""
        return any(spare() for spare in self.spares)

    def say(self, feature: str, status: Status, path: str, reason: str = "", holds: bool | None = None) -> None:
        """Set the line of `feature` in the report.

        Args:
            feature: by name.
            status, path, reason: as of `FeatureLine`.
            holds: whether what the feature is for is so; None: where it is on. True where there is nothing to do.

        Raises:
            ValueError: it does not hold when `train` begins, and was switched on by name.
        """
        self.report.add(feature, status, path, reason)
        if self.insists and not (status == "on" if holds is None else holds) and self.settings.names(feature):
            raise ValueError(f"{feature}={self.settings.get(feature)!r}: {reason}; {self.remedy(feature)}")

    def end(self, feature: str, path: str, reason: str) -> None:
        """Say that `feature` is off from here on, in the middle of a run; also in the log."""
        remedy = f"; {self.remedy(feature)}" if self.settings.names(feature) else ""
        logger.warning(f"{feature}: {path} from here on: {reason}{remedy}")
        self.say(feature, "off", path, reason)

    def remedy(self, feature: str) -> str:
        """Return what to set so that `feature`, switched on by name, stops no run."""
        default = type(self.settings).__dataclass_fields__[feature].default
        return f"set {feature}={default!r} to train without it where it cannot run"

    def part(self, kind: type[_Part]) -> _Part | None:
        """Return the object that a feature keeps while it is on, by its class, which only that feature's room names."""
        return self._parts.get(kind)

    def keep(self, part: object) -> None:
        """Keep `part` for `Run.part`, by its class."""
        self._parts[type(part)] = part

    @contextmanager
    def keeping(self, part: object) -> Iterator[None]:
        """Keep `part` until the context ends; what was kept of its class before is there again then."""
        with self.without(type(part)):
            self.keep(part)
            yield

    @contextmanager
    def without(self, kind: type[Any]) -> Iterator[None]:
        """Let `Run.part` find no part of a class until the context ends."""
        before = self._parts.pop(kind, None)
        try:
            yield
        finally:
            self._parts.pop(kind, None)
            if before is not None:
                self.keep(before)

    def mark(self) -> Callable[[], None]:
        """Return a function that takes back the figures of all micro-batches from here on; it may be called twice."""
        marks = [begin() for begin in self.undo]

        def back() -> None:
            for undo in marks:
                undo()

        return back


def _no_attention(_: Bucket) -> str:
    return "stock's attention reads the documents of each row anew"
