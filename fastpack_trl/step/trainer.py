"""`SyncFreeTrainer`: the methods of `trl.SFTTrainer` that a step passes, each asking `SyncFreeStep` first."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

from torch import Tensor
from trl import SFTTrainer

from fastpack_trl.model.patches import attribute_set
from fastpack_trl.model.user_code import is_upstreams
from fastpack_trl.step.accumulation import MergingTrainer
from fastpack_trl.step.sync_free import SyncFreeStep


class _SettledAtRead:
    """An attribute of TRL's trainer to which `DeferredMetrics` adds: complete for whoever reads it between two logs.

    In one of several processes it is as of the last log: to settle the metrics is for all of them together.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        instance._settle_alone()
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


class _Warnings:
    """Python's `warnings` two frames further up: past `SyncFreeTrainer.compute_loss`, and past this method."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, **options: Any) -> None:
        warnings.warn(message, category, stacklevel + 2, **options)


def _warnings_of_caller() -> contextlib.AbstractContextManager[None]:
    """Let what `SFTTrainer.compute_loss` warns of its caller name the caller of ours."""
    module = sys.modules[SFTTrainer.__module__]
    return attribute_set(module, "warnings", _Warnings()) if hasattr(module, "warnings") else contextlib.nullcontext()


class SyncFreeTrainer(MergingTrainer):
    """`trl.SFTTrainer`, stock as long as `fastpack_step` is None or not running."""

    @property
    def fastpack_step(self) -> SyncFreeStep | None:
        """The feature `sync_free`'s step; None where the feature is off."""
        return self.fastpack_run.part(SyncFreeStep)

    _metrics = _SettledAtRead()
    _total_train_tokens = _SettledAtRead()

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Do as `SFTTrainer.compute_loss`; the metrics of the batch reach the log later."""
        if inputs.get("position_ids") is None:
            inputs.pop("packed_batch", None)  # without its positions a row is one document, as in stock
        step = self.fastpack_step
        if step is None or not step.takes(self.fastpack_run, inputs, return_outputs):
            with _warnings_of_caller() if return_outputs else contextlib.nullcontext():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return step.batch_loss(self.fastpack_run, model, inputs, num_items_in_batch)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do as `SFTTrainer.training_step`; return the addend of the logged loss, which the NaN filter may replace."""
        step = self.fastpack_step
        skipping: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if step is not None and step.host:
            skipping = step.modes.skipping_train(model)
            step.reset.install(self, model)
        kept = len(step.metrics) if step is not None else 0
        with skipping:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return step.logged_loss(self, loss, kept) if step is not None and step.filters else loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Do as `Trainer.floating_point_ops`; parameters are counted once per run."""
        step = self.fastpack_step
        if step is None or not step.host:
            return int(super().floating_point_ops(inputs))
        step.filter.restore()  # the first call after the line that reads it
        return step.flops.count(self, inputs, super().floating_point_ops)

    def _clip_grad_norm(self, model: Any) -> Any:
        step = self.fastpack_step
        norm = None if step is None else step.clip(self, model)
        if norm is not None:
            return norm
        return super()._clip_grad_norm(self._with_gradients(model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        listed = model if grad_norm is not None else self._with_gradients(model)
        return super()._get_grad_norm(listed, grad_norm=grad_norm)

    def _with_gradients(self, model: Any) -> Any:
        """Return what stands for `model` where upstream reads its gradients only; `model` itself where it may not.

        FSDP compares all parameters, and a method that somebody put in the place of upstream's may ask for anything.
        """
        step = self.fastpack_step
        upstreams = is_upstreams(SFTTrainer._clip_grad_norm) and is_upstreams(SFTTrainer._get_grad_norm)
        if step is None or not step.host or self.fastpack_run.is_sharded or not upstreams:
            return model
        return step.reset.listed(model, self.optimizer)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Do as `SFTTrainer.log`."""
        self._settle_alone()
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Do as `Trainer.evaluation_loop`."""
        self._settle_metrics()  # stock reports the tokens trained on so far beside the evaluation
        outputs = super().evaluation_loop(*args, **kwargs)
        self._settle_metrics()
        return outputs

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_evaluate:
            self._settle_metrics()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._settle_metrics()
        return super()._finalize_training(*args, **kwargs)

    def _settle_alone(self) -> None:
        # One rank of several may log or read on its own; to settle the metrics is for all of them together.
        accelerator = getattr(self, "accelerator", None)  # absent while stock constructs
        if accelerator is not None and accelerator.num_processes == 1:
            self._settle_metrics()

    def _settle_metrics(self) -> None:
        step = self.fastpack_step
        if step is not None:
            step.metrics.settle(self)

    def close(self) -> None:
        """Give the model its stock forward back; further runs of this trainer use stock's loss and metrics."""
        step = self.fastpack_step
        if step is not None:
            step.close()
