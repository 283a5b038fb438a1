"""`Run`: what a trainer has decided about its runs, and what serves their steps. Features read it, never the report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import Trainer
from trl import SFTTrainer

from fastpack_trl.config import Settings
from fastpack_trl.model.facts import position_use
from fastpack_trl.model.hooks import hook_inside, hook_on_a_gradient
from fastpack_trl.model.sharded import Ranks
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.dataset import DatasetFacts
from fastpack_trl.report import FeatureReport, Status

logger = get_logger(__name__)

SHARDED = "parameters are sharded while the step runs"
ONCE_SHARDED = "decided when train() begins, after FSDP has sharded the parameters; see the banner"
DEEPSPEED = "DeepSpeed's engine owns backward and step"
MERGED_ROW_TOKENS = 8192
"""Tokens of a row up to which ``merge_accumulation="auto"`` merges on CUDA: in longer rows kernels outlast launches."""

Kind = Literal["sft", "pairs", "online"]
"""``sft``: rows of documents; ``pairs``: completions that are judged (DPO, KTO, Reward); ``online``: also generated."""
KINDS: tuple[Kind, ...] = get_args(Kind)
PlanBatches = Callable[[Any, str, bool, str], BatchPlan]
MicroStep = Callable[[Any, Any, Any], Tensor]
"""Runs one micro-batch, forward and backward: model, inputs and the tokens of the step to a detached loss."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that keeps packed documents apart, and the reason."""

    path: str
    """A backend (``varlen``, ...), `PADDED_DOCUMENTS`, or ``off``: transformers' attention."""
    reason: str
    flattens: bool = False
    """Batches that TRL pads become rows without padding."""
    unproven: str = ""
    """The reason why batches that TRL pads stay padded although the path can flatten them; empty if they need not."""
    setting: str = ""
    """The value of `packed_attention` for which a run chose it."""


@dataclass
class StepServices:
    """State of a run's steps, which changes from step to step.

    Attributes:
        levels: how the layers of the decoder run (kept, recomputed, offloaded), of which graphs are; empty: as TRL's.
        by_step: each step has a plan of its own.
        is_recordable: none of them recomputes or offloads in this step alone, for want of memory.
        activations_left: bytes that the plan of the activations leaves of its budget, 0 if it recomputes a layer for
            want of memory; None without such a plan. Copies of frozen weights take of it, then CUDA graphs. With plans
            by step what three of four steps leave beside the graphs.
        activation_bytes: memory of the activations of a step by that plan: a CUDA graph holds as much once more.
        offloads: layer inputs go to host memory.
    """

    levels: tuple[object, ...] = ()
    by_step: bool = False
    is_recordable: bool = True
    activations_left: int | None = None
    activation_bytes: int = 0
    offloads: bool = False


@dataclass(eq=False, repr=False)
class Decisions:
    """Decisions of the features, each made in one place when the trainer is built or a run begins.

    A LoRA run with ``packing=True`` on a GPU: ``choice.path == "varlen"``, ``plan.kind == "packed"``,
    ``facts.longest == 4096``, ``training``, ``loss_is_ours``, not ``shares_prefixes``.

    Attributes:
        settings: the resolved settings; defaults for a plain `SFTConfig`.
        choice: the attention path.
        plan: the kind of batches.
        facts: facts about the training data; None if it is streamed or was prepared elsewhere.
        training: `train` is running or ran last, not a separate evaluation.
        loss_is_ours: losses and metrics are computed per token, at the positions that the collator found.
        shares_prefixes: training rows hold a common beginning of documents once.
        refuses_static: returns why the installed attention cannot run over static batches of a bucket.
        refuses_experts: returns why the experts of the model cannot be part of a CUDA graph on a device.
    """

    settings: Settings
    choice: Choice = Choice("off", "")
    plan: BatchPlan = field(default_factory=lambda: BatchPlan("stock", ""))
    facts: DatasetFacts | None = None
    training: bool = False
    loss_is_ours: bool = False
    shares_prefixes: bool = False
    refuses_static: Callable[[Bucket], str] = "TRL's attention reads the documents of each row again".format
    refuses_experts: Callable[[torch.device], str] = "".format
    _are_fixed = False  # while steps run

    def __setattr__(self, name: str, value: Any) -> None:
        if self._are_fixed and name in DECIDED:
            raise AssertionError(f"run.{name} is decided before the first step, not in the middle of a run")
        super().__setattr__(name, value)


DECIDED = frozenset(one.name for one in fields(Decisions))
"""Names of all decisions."""


class Run(Decisions):
    """One object between a trainer and its features: decisions, parts that are installed, state of steps, the report.

    ```python
    run = trainer.fastpack_run
    run.plan.kind, run.choice.path  # "packed", "varlen": decided when the trainer was built
    run.lora  # the LoraReport while `train` runs; None before and after
    run.report["lora"].reason  # for people; no code decides by it
    ```

    Args:
        trainer: held by a weak reference.
        settings: fields of this package in its arguments.
        kind: of the trainer.
        plan_batches: returns the kind of its batches, as `packing.batching.plan_batches` does for SFT.
        sequences: rows of a batch for each example of the data set.

    Attributes:
        step: state of the steps.
        report: the report for people.
        disabled: why no feature runs; empty if they may.
        shown: the banner that was printed last.
        is_entered: features are installed.
        host: the `HostWork` that need not be done in each micro-batch.
        is_strict: `train` is entering its features, and stops if one that was enabled by name is unavailable.
        proof: the `PackingProof` of the last packing check.
        examined: attention and model of that check.
        rate: the `MeasuredRate` of the last `train`.
        backbone: the `BackboneCall` by which losses call the decoder.
        sync_free: the `SyncFreeStep` of the trainer. All that follow are None unless their feature is on.
        attention: the installed `PackedAttention`.
        kinds: the `Kinds` of its decoder layers.
        image_rows: the `PackedRows` of samples with images.
        lora: the `LoraReport` of the fast layers.
        memory: the `ActivationMemory` of the plan.
        merging: the `Merging` of micro-batches.
        graphs: the `BackboneGraphs`.
        reduce: the `FlatReduce` of several processes.
        has_side_stream: the run trains on a stream of its own from its start.
        shared_rows_compute: share of the documents' tokens that rows with shared prefixes compute, by a sample.
    """

    disabled = shown = ""
    is_entered = is_strict = has_side_stream = False
    _unset: Any = None
    host = proof = examined = rate = backbone = sync_free = _unset
    attention = kinds = image_rows = lora = memory = merging = graphs = reduce = _unset
    shared_rows_compute: float | None = None

    def __init__(
        self, trainer: Trainer, settings: Settings, kind: Kind, plan_batches: PlanBatches, sequences: int = 1
    ) -> None:
        super().__init__(settings)
        self.kind, self.plan_batches, self.sequences = kind, plan_batches, sequences
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self.step = StepServices()
        self.report = FeatureReport()

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
    def is_warmed_up(self) -> bool:
        """Nothing is left that the first steps decide: how processes reduce their gradients."""
        return self.reduce is None or not self.reduce.is_pending

    def steps_left(self) -> int:
        """Return the number of remaining optimizer steps."""
        return self.trainer.state.max_steps - self.trainer.state.global_step

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


def looks_inside(run: Run) -> Iterator[object]:
    """Yield what of a run needs the forward and backward pass of each micro-batch as TRL launches it."""
    args, model = run.args, run.model
    yield run.is_deepspeed and DEEPSPEED
    yield run.is_sharded and SHARDED
    yield args.neftune_noise_alpha and "NEFTune's noise depends on the length of a row"
    yield steps_in_backward(args)
    yield position_use(model).by_longest and "the rotary embedding depends on the longest document of a row"
    yield hook_on_a_gradient(model, model.parameters())
    yield (hook := hook_inside(model)) and f"{hook} runs once per micro-batch"


def steps_in_backward(args: Any) -> str:
    """Return which optimizer steps in the backward pass, or ``""``."""
    optim = str(getattr(args.optim, "value", args.optim)).lower()
    return f"optim={optim!r} steps in the backward pass" if "lomo" in optim else ""
