"""`FeaturedTrainer`: what every trainer of this package has around its stock methods."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.proof import PackingProof
from fastpack_trl.callbacks.save_report import add_to_card
from fastpack_trl.config import Settings
from fastpack_trl.features import FEATURES
from fastpack_trl.model.changes import during_training
from fastpack_trl.model.hooks import is_users
from fastpack_trl.model.preflight import choose_checkpoint
from fastpack_trl.model.upstream import missing_names
from fastpack_trl.moe.quantised import quantize_experts
from fastpack_trl.packing.examples import naming_the_row
from fastpack_trl.report import FeatureReport, disabled_by_environment
from fastpack_trl.run import Run
from fastpack_trl.step.hostwork import HostWork

if TYPE_CHECKING:
    from transformers import Trainer as _Stock
else:
    _Stock = object

logger = get_logger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def documented_as(stock: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Give a method the signature and the docstring of stock's: people read them in their editor."""

    def decorate(method: _Method) -> _Method:
        return cast("_Method", functools.wraps(stock, assigned=("__doc__", "__name__"))(method))

    return decorate


def _own(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one class alone that calls `method`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


_SHOWN = ("__init__", "train", "evaluate", "predict", "create_model_card")


class FeaturedTrainer(_Stock):
    """Enters the features around the methods of the trainer of TRL that comes after it among the bases.

    A class that names its ``_fastpack_stock`` has that one's signatures and docstrings.

    Attributes:
        fastpack_run: what this trainer has decided; the features read it.
    """

    fastpack_run: Run
    _fastpack_stock: ClassVar[type[Any]]
    _fastpack_kinds: ClassVar[tuple[Literal["any", "sft"], ...]] = ("any",)
    _fastpack_entered = False
    _fastpack_shown = ""
    _fastpack_disabled = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock = vars(cls).get("_fastpack_stock")
        for name in _SHOWN if stock is not None else ():
            setattr(cls, name, documented_as(getattr(stock, name))(_own(getattr(cls, name))))

    @staticmethod
    def _fastpack_why_disabled() -> str:
        if disabled_by_environment():
            return "FASTPACK_DISABLE is set"
        missing = ", ".join(missing_names("batches"))
        return f"torch, transformers or trl lacks {missing}" if missing else ""

    @property
    def fastpack_report(self) -> FeatureReport:
        """The chosen paths, with reasons; `FeatureReport.to_dict` for machines. Complete once training has started."""
        return self.fastpack_run.report

    @property
    def fastpack_proof(self) -> PackingProof | None:
        """The packing proof of the last training start; None where none ran."""
        return self.fastpack_run.get_state(PackingProof)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # Called while stock constructs. Packed on their way, expert stacks need not fit the device as dense ones.
        self._fastpack_quantize(model, device)
        super()._move_model_to_device(model, device)

    def _fastpack_quantize(self, model: Any, device: torch.device | None = None) -> None:
        if self._fastpack_disabled or self.fastpack_run.settings.moe_quantize_experts != "on":
            return
        done, facts = quantize_experts(model, device), self.fastpack_report.facts
        facts.setdefault("quantised experts", str(done))  # a second call finds nothing left to do

    def _fastpack_name_faults(self, prepare: Callable[..., Any], stock: Callable[..., Any], *given: Any) -> Any:
        """Prepare a data set; name the example at fault."""
        return stock(*given) if self._fastpack_disabled else naming_the_row(prepare, stock, *given)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._fastpack_disabled:
            resume_from_checkpoint, note = choose_checkpoint(resume_from_checkpoint, self.args.output_dir)
            if note:
                logger.warning(note)
        with self._fastpack_features(announce=True):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._fastpack_features():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._fastpack_features():
            return super().predict(*args, **kwargs)

    def _fastpack_lists(self) -> HostWork | None:
        """Return the lists that stand for walks over the model; None if there are none."""
        return None

    def _fastpack_with_gradients(self, model: Any) -> Any:
        """Return what stands for `model` where stock reads its gradients only; `model` itself where it may not.

        FSDP compares all parameters, and a method that somebody put in the place of stock's may ask for anything.
        """
        host, stock = self._fastpack_lists(), self._fastpack_stock
        replaced = is_users(stock._clip_grad_norm) or is_users(stock._get_grad_norm)
        is_whole = model is self.model or model is self.model_wrapped
        if host is None or not host.active or replaced or not is_whole or self.fastpack_run.is_sharded:
            return model
        listed = host.with_gradients(self.model, self.optimizer)
        return model if listed is self.model else listed

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(self._fastpack_with_gradients(model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        listed = self._fastpack_with_gradients(model) if grad_norm is None else model
        return super()._get_grad_norm(listed, grad_norm=grad_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count operations as stock does, without its walk over all parameters."""
        host = self._fastpack_lists()
        if host is None or not host.active or not isinstance(inputs, Mapping):  # prompts to complete are a list
            return int(super().floating_point_ops(inputs))
        return host.count_flops(self, inputs, super().floating_point_ops)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if not self._fastpack_disabled:
            add_to_card(self.fastpack_run)

    def _fastpack_settings(self, training: bool) -> Settings:
        return Settings.of(self.args, training)

    @contextlib.contextmanager
    def _fastpack_features(self, announce: bool = False) -> Iterator[None]:
        if self._fastpack_disabled or self._fastpack_entered:
            yield  # evaluation inside of training: installed already
            return
        run = self.fastpack_run
        run.settings, run.training, run.is_strict = self._fastpack_settings(announce), announce, announce
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, run, "is_strict", False)  # also where a feature stops the run
            if announce:
                stack.enter_context(during_training(self, at_begin=run.begin_steps))
            for feature in FEATURES:
                if feature.trainers in self._fastpack_kinds and (announce or feature.when == "always"):
                    feature.enter(run, stack)
            self._fastpack_enter(stack)

            def begin() -> None:
                stack.enter_context(run.fixed())
                if announce:
                    self._fastpack_announce()

            if announce and run.is_fsdp2:  # some of it is decided once the parameters are parted
                stack.enter_context(during_training(self, at_begin=begin))
            else:
                begin()
            self._fastpack_entered, run.is_strict = True, False
            stack.callback(setattr, self, "_fastpack_entered", False)
            yield

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        """Install what is of one trainer alone, after the features."""

    def _fastpack_announce(self) -> None:
        """Print the banner, once per content: `train` may be called many times."""
        banner = self.fastpack_report.banner()
        if self.is_world_process_zero() and banner != self._fastpack_shown:
            print(banner, flush=True)
        self._fastpack_shown = banner
