"""The feature `sync_free`: parts of a training step that do not synchronize, and the reasons why others do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from trl import SFTTrainer

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import is_prompt_learning, text_model
from fastpack_trl.model.hooks import LOOP_METHODS, hook_on_the_outputs, needs_logits, replaced_methods
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import DEEPSPEED, Run
from fastpack_trl.step.hostwork import HostWork, LossFilter
from fastpack_trl.step.load_balancing import replaced_by
from fastpack_trl.step.loss import LossForward, head_of, step_loss
from fastpack_trl.step.metrics import DeferredMetrics, Mode

_EDITED_LABELS = (
    "labels were copied (accelerate does so with a streamed evaluation set: dispatch_batches) or edited after "
    "collation: their positions are found again, which synchronizes with the device"
)
_EVALUATION = "evaluation with compute_metrics is TRL's"
_REENTRANT = "it is without effect: reentrant checkpointing drops its gradient, set use_reentrant=False"
_STATE = ("_metrics", "_total_train_tokens", "_tp_size", "aux_loss_enabled", "router_aux_loss_coef")


class SyncFreeStep:
    """What a step does without asking the device. Made once per trainer; `running` switches it on around a run.

    Attributes:
        loss: whether losses and metrics are ours.
        host: walks over the model that are spared.
        filters: whether the NaN filter is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loss = self.filters = False
        self.metrics = DeferredMetrics()
        self.forward = LossForward(text_model(model))
        self.host, self.filter = HostWork(), LossFilter()

    def takes(self, run: Run, inputs: Any, return_outputs: bool = False) -> bool:
        """Return whether this batch is a row without padding, whose loss and metrics are made here; else it is said."""
        if not self.loss:
            return False
        why_stock = first_reason(_only_stock_batch(run, inputs, return_outputs))
        if why_stock:
            run.report.remark("sync_free", why_stock)
        return not why_stock

    def batch_loss(self, run: Run, model: Any, inputs: Any, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the loss of a micro-batch; its metrics are kept for the next log."""
        trainer = run.trainer
        mode: Mode = "train" if trainer.model.training else "eval"
        batch, why_stock = inputs.get("packed_batch"), ""
        if not isinstance(batch, PackedBatch) or batch.loss_positions is None:
            batch, why_stock = None, "a batch without packed_batch"
        elif not batch.parts and (why_stock := hook_on_the_outputs(trainer.model_wrapped)):
            inputs, batch = unshared(inputs), None
        # On one rank of several, perhaps: what the ranks do together is the same with outputs of TRL's forward.
        loss, table, loss_tokens, edited = step_loss(trainer, model, inputs, num_items_in_batch, batch)
        if why_stock:
            run.report.remark("sync_free", f"TRL's model outputs for {why_stock}")
        if edited:
            run.report.remark("sync_free", _EDITED_LABELS)
        # As TRL counts them, but for positions of several sections: a row may have been cut short.
        known = batch is not None and (batch.parts or batch.documents)
        tokens = row_tokens(batch) if batch is not None and known else [inputs["position_ids"].shape[-1]]
        self.metrics.keep(trainer, mode, table, loss_tokens, tokens)
        return loss

    def filtered(self, trainer: SFTTrainer, loss: Tensor) -> Tensor:
        """Return the loss that the trainer sums for the log, after the NaN filter."""
        return self.filter.apply(trainer, loss) if self.filters else loss

    @contextlib.contextmanager
    def running(self, trainer: SFTTrainer, *, loss: bool, host: bool, filters: bool) -> Iterator[None]:
        """Switch the parts on until the context ends."""
        self.loss, self.filters = loss, filters
        try:
            with self.host.running(trainer) if host else contextlib.nullcontext():
                yield
        finally:
            self.loss = self.filters = False
            self.filter.restore()


@contextlib.contextmanager
def sync_free(run: Run) -> Iterator[None]:
    """Make no device-to-host sync between two logs, as far as the run permits."""
    step = run.get_state(SyncFreeStep)
    if step is None or run.settings.sync_free == "off":
        run.set_status("sync_free", "off", "stock", "switched off")
        with run.without(SyncFreeStep):  # the step was made with the trainer, the setting may have changed since
            yield
        return
    # Joint, because TRL's loss gathers its figures in each micro-batch, ours between two logs.
    stock = run.ranks.first_reason(lambda: why_stock_loss(run))
    own_step = replaced_methods(run.trainer, (*LOOP_METHODS, "training_step", "floating_point_ops"))
    remarks = _remarks(run, own_step)
    host = not run.is_deepspeed
    ours = (["loss, metrics"] if not stock else []) + (["host work"] if host else [])
    path = "host work only" if ours == ["host work"] else ", ".join(ours) or "stock"
    why = f"TRL's loss and metrics: {stock}" if stock else "logits computed once"
    run.set_status("sync_free", "on" if ours else "stock", path, "; ".join([why, *remarks]), holds=not stock and host)
    run.loss_is_ours = not stock
    try:
        # The filter is switched on again by what `host` replaces.
        with step.running(run.trainer, loss=not stock, host=host, filters=host and not own_step):
            yield
    finally:
        run.loss_is_ours = False


def why_stock_loss(run: Run) -> str:
    """Return why TRL computes loss and metrics in this run, or ``""``."""
    return first_reason(_only_stock_loss(run))


def _only_stock_loss(run: Run) -> Iterator[object]:
    trainer, step, model = run.trainer, run.get_state(SyncFreeStep), run.model
    assert step is not None
    lacks = [f"SFTTrainer.{name}" for name in _STATE if name not in vars(trainer)]
    yield lacks and f"trl lacks {', '.join(lacks)}"
    yield not run.packs and run.plan.reason
    yield needs_logits(trainer)
    yield is_prompt_learning(model) and "prompt learning puts virtual tokens before each row"
    plan = trainer.accelerator.parallelism_config
    sizes = [getattr(plan, f"{name}_size", 1) for name in ("tp", "cp", "sp")] if plan is not None else []
    yield any(size > 1 for size in sizes) and "tensor, context or sequence parallelism"
    flat = trainer.is_fsdp_enabled and not run.is_fsdp2
    yield flat and "FSDP version 1 flattens the head: set fsdp_version=2"
    yield run.is_deepspeed and run.is_sharded and "ZeRO-3 shards the head"
    devices = set((getattr(text_model(model), "hf_device_map", None) or {}).values())
    yield len(devices) > 1 and f"the model is spread over {', '.join(sorted(map(str, devices)))}"
    yield step.forward.missing
    yield not step.forward.in_place and "the model's forward was replaced"
    yield head_of(text_model(model))  # a text where it has none of ours, else a module
    other = trainer.aux_loss_enabled and replaced_by()
    yield other and f"load_balancing_loss_func was replaced by {other}"


def _only_stock_batch(run: Run, inputs: Any, return_outputs: bool) -> Iterator[object]:
    trainer = run.trainer
    padded = inputs.get("position_ids") is None or inputs.get("attention_mask") is not None
    if not trainer.model.training:
        unlike = return_outputs or padded
        yield unlike and trainer.compute_metrics is not None and _EVALUATION
        yield unlike and "evaluation of padded batches, or with predictions, is TRL's"
    yield return_outputs and "TRL's loss and metrics if compute_loss is called with return_outputs=True"
    yield padded and "TRL's loss and metrics for rows with an attention mask or without position_ids"
    yield inputs.get("labels") is None and "TRL's loss and metrics for batches without labels"
    why = needs_logits(trainer)
    yield why and f"{why}, on rows as collated: it was set in the middle of the run"


def row_tokens(batch: PackedBatch) -> list[int]:
    """Return the tokens of each row that a plain batch was made of, padding included."""
    whole = batch.total_tokens if batch.documents is None else batch.documents.capacity
    return [part.capacity for part in batch.parts] or [whole]


def _remarks(run: Run, own_step: str) -> list[str]:
    """Return which other parts still synchronize or run TRL's code."""
    args, trainer = run.args, run.trainer
    stays = bool(own_step) and not run.is_deepspeed
    counts = str(args.include_num_input_tokens_seen).lower() not in ("no", "false")
    remarks = (
        args.fp16 and "the loss scaler of fp16 synchronizes once per optimizer step",
        trainer.compute_metrics is not None and _EVALUATION,
        stays and f"the NaN filter synchronizes: {own_step} may look at the loss",
        counts and "include_num_input_tokens_seen synchronizes in each micro-batch",
        run.is_deepspeed and f"TRL's host work and NaN filter: {DEEPSPEED}",
        trainer.aux_loss_enabled and f"load-balancing loss with coefficient {trainer.router_aux_loss_coef:g}",
        trainer.aux_loss_enabled and _is_reentrant(args) and _REENTRANT,
    )
    return [text for text in remarks if text]


def _is_reentrant(args: Any) -> bool:
    return bool(args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
