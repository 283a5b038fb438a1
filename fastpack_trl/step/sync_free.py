"""`SyncFreeStep`: the parts of a training step that do not synchronize."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from trl import SFTTrainer

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.hooks import hook_on_the_outputs, needs_logits
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.packed_inputs import PaddedInputs
from fastpack_trl.run import Run
from fastpack_trl.step.hostwork import HostWork, LossFilter
from fastpack_trl.step.loss import LossForward, step_loss
from fastpack_trl.step.metrics import DeferredMetrics, Mode

_EDITED_LABELS = (
    "labels were copied (accelerate does so with a streamed evaluation set: dispatch_batches) or edited after "
    "collation: their positions are found again, which synchronizes with the device"
)
EVALUATION = "evaluation with compute_metrics is TRL's"


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
        if batch is not None and batch.parts:
            tokens = [part.capacity for part in batch.parts]
        elif batch is not None and batch.documents is not None:
            tokens = [batch.documents.capacity]
        elif isinstance(inputs, PaddedInputs):
            tokens = [int(inputs["attention_mask"].sum())]
        else:
            tokens = [inputs["position_ids"].shape[-1]]
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


def _only_stock_batch(run: Run, inputs: Any, return_outputs: bool) -> Iterator[object]:
    trainer = run.trainer
    padded = inputs.get("position_ids") is None or inputs.get("attention_mask") is not None
    padded = padded and not isinstance(inputs, PaddedInputs)
    if not trainer.model.training:
        unlike = return_outputs or padded
        yield unlike and trainer.compute_metrics is not None and EVALUATION
        yield unlike and "evaluation of padded batches, or with predictions, is TRL's"
    yield return_outputs and "TRL's loss and metrics if compute_loss is called with return_outputs=True"
    yield padded and "TRL's loss and metrics for rows with an attention mask or without position_ids"
    yield inputs.get("labels") is None and "TRL's loss and metrics for batches without labels"
    why = needs_logits(trainer)
    yield why and f"{why}, on rows as collated: it was set in the middle of the run"
