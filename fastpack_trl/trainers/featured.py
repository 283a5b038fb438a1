"""`FeaturedTrainer`: the base class of every trainer of this package."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.proof import PackingProof
from fastpack_trl.config import Settings
from fastpack_trl.features import FEATURES, moe
from fastpack_trl.features.packed_attention import choose_attention
from fastpack_trl.features.save_report import add_to_card
from fastpack_trl.model.changes import during_training, patch_attribute, silence_renamed_checkpointing
from fastpack_trl.model.early import begin_triton, many_small_operations
from fastpack_trl.model.hooks import is_users
from fastpack_trl.model.precision import fit_precision
from fastpack_trl.model.preflight import bound, choose_checkpoint
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.examples import check_given, naming_row, null_turns
from fastpack_trl.report import FeatureReport, disabled_by_environment
from fastpack_trl.run import Kind, Run
from fastpack_trl.step.hostwork import HostWork

if TYPE_CHECKING:
    from transformers import Trainer as _Stock
else:
    _Stock = object

logger = get_logger(__name__)


class Of(NamedTuple):
    """The trainer of TRL that a class of ours extends: ``Of(DPOTrainer, "pairs", sequences=2)``."""

    stock: type[Any]
    kind: Kind
    sequences: int = 1
    """Rows of a batch for each example of the data set."""

    @property
    def method(self) -> str:
        """Return the name of its command: ``"dpo"``."""
        return self.stock.__name__.removesuffix("Trainer").lower()


class FeaturedTrainer(_Stock):
    """Enters the features around methods of the TRL trainer that follows it in the method resolution order.

    A class that sets ``_fastpack_of`` has the constructor's signature and docstring of that TRL trainer.
    """

    fastpack_run: Run
    """Decisions of this trainer, for its features."""
    _fastpack_of: ClassVar[Of]
    _fastpack_plan: Callable[[Any, str, bool, str], BatchPlan]
    """Returns the kind of batches, given the trainer and its attention path."""
    _fastpack_constructing: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Any]]
    """Checks the arguments; returns a context for the constructor of TRL's trainer."""
    _fastpack_replace_forward: Callable[[], None]
    """Replaces the forward method of the model, before accelerate wraps it."""
    _fastpack_decides: tuple[Any, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        of = self._fastpack_of
        disabled = "FASTPACK_DISABLE is set" if disabled_by_environment() else missing_reason("batches")
        given = bound(of.stock, self, args, kwargs)
        settings = Settings.of(given.get("args"), training=not disabled)
        run = self.fastpack_run = Run(self, settings, of.kind, self._fastpack_plan, of.sequences)
        run.disabled, run.host = disabled, HostWork()
        if disabled:
            super().__init__(*args, **kwargs)
            run.set_status("fastpack", "off", "stock", disabled)
            return
        begin_triton()  # while TRL reads the data
        check_given(given.get("train_dataset"), given.get("peft_config"), of.method)
        with silence_renamed_checkpointing(), self._fastpack_constructing(given):
            super().__init__(*args, **kwargs)
        self._fastpack_choose()

    def _fastpack_forget_loaders(self, decides: tuple[Any, ...]) -> None:
        """Drop kept evaluation loaders if what decides on rows changed: workers collate as when they were started."""
        if decides != self._fastpack_decides:
            getattr(self, "_eval_dataloaders", {}).clear()
        self._fastpack_decides = decides

    def _fastpack_choose(self) -> None:
        """Choose the attention path, once: TRL may compute reference log-probabilities while it constructs."""
        run = self.fastpack_run
        if not run.choice.setting:
            moe.quantize(run, self.model)  # unless the model was moved already
            run.report.facts |= fit_precision(self)
            moe.choose_experts(run)
            self._fastpack_replace_forward()
            choose_attention(run)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_fastpack_of" in vars(cls):

            @functools.wraps(cls._fastpack_of.stock.__init__)  # people read its signature in their editor
            def construct(self: Any, *args: Any, **kwargs: Any) -> None:
                FeaturedTrainer.__init__(self, *args, **kwargs)

            cls.__init__ = construct  # type: ignore[method-assign]

    @property
    def fastpack_report(self) -> FeatureReport:
        """The chosen paths with reasons, complete once training has started; `FeatureReport.to_dict` for machines."""
        return self.fastpack_run.report

    @property
    def fastpack_proof(self) -> PackingProof | None:
        """The packing check of the last training start; None if none ran."""
        proof: PackingProof | None = self.fastpack_run.proof
        return proof

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # Called while TRL constructs: dense expert stacks need not fit the device, because each is packed on its way.
        moe.quantize(self.fastpack_run, model, device)
        super()._move_model_to_device(model, device)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL's trainer, with the features."""
        if not self.fastpack_run.disabled:
            resume_from_checkpoint, note = choose_checkpoint(resume_from_checkpoint, self.args.output_dir)
            if note:
                logger.warning(note)
        with self._fastpack_features(announce=True):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL's trainer, with the features."""
        with self._fastpack_features():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as TRL's trainer, with the features."""
        with self._fastpack_features():
            return super().predict(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(_with_gradients(self, model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        listed = _with_gradients(self, model) if grad_norm is None else model
        return super()._get_grad_norm(listed, grad_norm=grad_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count operations as TRL does, without its walk over all parameters."""
        if not self.fastpack_run.host.active or not isinstance(inputs, Mapping):  # prompts to complete are a list
            return int(super().floating_point_ops(inputs))
        return self.fastpack_run.host.count_flops(self, inputs, super().floating_point_ops)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if not self.fastpack_run.disabled:
            add_to_card(self.fastpack_run)

    @contextlib.contextmanager
    def _fastpack_features(self, announce: bool = False) -> Iterator[None]:
        run, args = self.fastpack_run, self.args
        if run.disabled or run.is_entered:
            yield  # evaluation during training: already installed
            return
        waits = (args.bf16_full_eval or args.fp16_full_eval) and not (run.is_sharded or self.is_model_parallel)
        if waits and next(self.model.parameters()).device.type != args.device.type:
            self._move_model_to_device(self.model, args.device)  # TRL does so later, after the packing check
        if announce and args.use_liger_kernel:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(self.model, args.liger_kernel_config)  # TRL does so later, after classes are compared
        run.settings, run.training, run.is_strict = Settings.of(self.args, announce), announce, announce
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, run, "is_strict", False)  # also where a feature stops the run
            stack.enter_context(silence_renamed_checkpointing())
            for feature in FEATURES:
                with contextlib.nullcontext() if feature.reads_data else many_small_operations(run.device):
                    feature.enter(run, stack)
            self._fastpack_enter(stack)

            def begin() -> None:
                stack.enter_context(patch_attribute(run, "_are_fixed", True))
                banner = self.fastpack_report.banner()
                if announce and banner != run.shown and self.is_world_process_zero():
                    print(banner, flush=True)
                    run.shown = banner  # once per content: `train` may be called many times

            if announce and run.is_fsdp2:  # some decisions need sharded parameters
                stack.enter_context(during_training(self, at_begin=begin))
            else:
                begin()
            run.is_entered, run.is_strict = True, False
            stack.callback(setattr, run, "is_entered", False)
            yield

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        """Install the parts of this kind of trainer, after the features."""


def _with_gradients(trainer: FeaturedTrainer, model: Any) -> Any:
    """Return an object with the parameters that have a gradient, or `model` itself if that is not enough.

    FSDP compares all parameters, and a replaced method may read anything.
    """
    run, stock = trainer.fastpack_run, trainer._fastpack_of.stock
    replaced = is_users(stock._clip_grad_norm) or is_users(stock._get_grad_norm)
    is_whole = model is trainer.model or model is trainer.model_wrapped
    if not run.host.active or replaced or not is_whole or run.is_sharded:
        return model
    listed = run.host.with_gradients(trainer.model, trainer.optimizer)
    return model if listed is None else SimpleNamespace(parameters=listed.__iter__)


def naming_faults(trainer: FeaturedTrainer, prepare: Callable[..., Any], stock: Callable[..., Any], *given: Any) -> Any:
    """Prepare a data set; name the example at fault, and report turns without content."""
    run = trainer.fastpack_run
    if run.disabled:
        return stock(*given)
    if given[-1] == "train" and (turns := null_turns(given[0])):
        run.report.facts["turns without content"] = turns
    return naming_row(prepare, stock, trainer._fastpack_of.method, *given)
