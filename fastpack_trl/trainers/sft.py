"""`FastSFTTrainer`: wires the features around `trl.SFTTrainer`, in the order of a step; computes nothing itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from itertools import chain
from typing import Any

from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from trl import SFTTrainer

from fastpack_trl.capture.ddp import reduced_after
from fastpack_trl.checkpointing.planned import gathered_once
from fastpack_trl.features.sync_free import prepare
from fastpack_trl.model.changes import during_training, patch_attribute
from fastpack_trl.model.preflight import check_given
from fastpack_trl.packing.batching import fast_view, has_images, is_stock_collator, packing_collator
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.dataset import prepare_in_two_passes
from fastpack_trl.packing.documents import DocumentsCollator, as_one_row
from fastpack_trl.packing.examples import check_label_column
from fastpack_trl.packing.packed_inputs import PackedInputs
from fastpack_trl.step.metrics import FlushedOnRead
from fastpack_trl.trainers.featured import FeaturedTrainer, Of, naming_faults
from fastpack_trl.trainers.sft_step import OptimizerStep, clear_derived
from fastpack_trl.vision.packing import BY_PLACE, Samples
from fastpack_trl.vision.rows import (
    ImageRows,
    in_step,
    is_vision_collator,
    naming_limit,
    plan_batches,
    smallest_with_image,
)


class FastSFTTrainer(FeaturedTrainer, SFTTrainer):
    """`trl.SFTTrainer`, faster on packed data: same arguments, loss, log keys and files.

    Also writes ``fastpack_report.json`` to `output_dir`, unless ``save_report="off"``.

    `args` may be a `trl.SFTConfig`, a `FastSFTConfig` or None. TRL's implementation runs if a feature does not
    support the model, data or machine; `fastpack_report` has the reason. ``FASTPACK_DISABLE=1`` disables all of them.

    Raises:
        ValueError: in addition to those of `SFTTrainer`: an attention that would be wrong for the model, labels and
            tokens of different lengths, an empty data set.
    """

    _fastpack_of = Of(SFTTrainer, "sft")
    _fastpack_plan = staticmethod(plan_batches)
    """What decided the batches of the last evaluation."""
    data_collator: Any  # set by transformers' Trainer; swapped while a loader is built
    _metrics = FlushedOnRead()
    _total_train_tokens = FlushedOnRead()

    def _fastpack_constructing(self, given: dict[str, Any]) -> AbstractContextManager[None]:
        check_given(given)
        self._fastpack_own_collator = given.get("data_collator") is not None
        return nullcontext()

    def _fastpack_replace_forward(self) -> None:
        prepare(self.fastpack_run)
        if (step := self.fastpack_run.sync_free) is not None:
            self.fastpack_run.host = step.host

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        given = (dataset, processing_class, args, packing, formatting_func, dataset_name)
        return naming_faults(self, self._fastpack_prepare, super()._prepare_dataset, *given)

    def _fastpack_prepare(self, *given: Any) -> Any:
        run, dataset, dataset_name = self.fastpack_run, given[0], given[-1]
        if self._fastpack_own_collator:
            return super()._prepare_dataset(*given)
        check_label_column(dataset, dataset_name)
        # An evaluation set may have that name too, and be passed during a run.
        count = run.facts is None and dataset_name == "train" and not self.fastpack_run.is_entered
        prepared, facts = prepare_in_two_passes(super()._prepare_dataset, *given, count=count)
        if facts is not None:
            run.facts = facts
        return prepared

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        training, collator = kwargs.get("is_training", False), self.data_collator
        if self._fastpack_collates(dataset, training, description):
            if has_images(self):
                return self._fastpack_image_loader(dataset, description, *args, **kwargs)
            if self.fastpack_run.packs:
                shares = self.fastpack_run.shares_prefixes and training
                collator, dataset = packing_collator(self, share_prefixes=shares), fast_view(dataset)
            else:
                collator = DocumentsCollator(collator)
        with patch_attribute(self, "data_collator", collator):
            return super()._get_dataloader(dataset, description, *args, **kwargs)

    def _fastpack_image_loader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        rows = self.fastpack_run.image_rows if kwargs.get("is_training", False) else None
        view, removes = dataset, self.args.remove_unused_columns
        if isinstance(dataset, Dataset) and (rows or self.args.train_sampling_strategy in BY_PLACE):
            view, removes = Samples(self._remove_unused_columns(dataset, description), rows and rows.rows), False
        spare = None
        if self.fastpack_run.is_sharded and self.args.world_size > 1:
            kept = chain.from_iterable(view) if isinstance(view, Samples) else dataset
            spare = smallest_with_image(kept, self.data_collator)
        with (
            patch_attribute(self, "data_collator", ImageRows(self.data_collator, self.model, spare)),
            patch_attribute(self.args, "remove_unused_columns", removes),
        ):
            return super()._get_dataloader(view, description, *args, **kwargs)

    def _fastpack_with_images(self, batches: list[Any]) -> list[Any]:
        run = self.fastpack_run
        waits = run.is_entered and run.packs and has_images(self) and run.is_sharded and run.ranks.count > 1
        return in_step(batches, run.ranks.all_max) if waits else batches

    def _fastpack_collates(self, dataset: Any, is_training: bool, description: str) -> bool:
        """Return whether a loader gets our collator; evaluation that returns predictions keeps TRL's shapes."""
        run = self.fastpack_run
        if not self.fastpack_run.is_entered or run.plan.kind == "stock":
            return False
        is_stock = is_vision_collator if has_images(self) else is_stock_collator
        if not is_stock(self.data_collator):  # set by the user during the run
            why = f"data_collator was replaced by {type(self.data_collator).__name__}"
            if run.report["batches"].reason != why:
                run.disable("batches", "stock", why)
            return False
        if is_training or run.plan.kind != "padding_free":
            return True
        # The mean of the evaluation losses is over batches, so flattening changes no figure; a data set without a
        # length would be counted by the first dimension of its batches.
        return self.compute_metrics is None and description.lower() != "test" and isinstance(dataset, Dataset)

    def _fastpack_enter(self, stack: ExitStack) -> None:
        decides = self.fastpack_run.plan, self.compute_metrics is None, type(self.data_collator)
        self._fastpack_forget_loaders(decides)
        self._fastpack_optimizer_step = step = OptimizerStep(self.fastpack_run)
        if self.fastpack_run.training:  # `auto_find_batch_size` begins again
            stack.enter_context(during_training(self, at_begin=step.reset))
        stack.callback(setattr, self, "_fastpack_optimizer_step", OptimizerStep(self.fastpack_run))  # holds no batch

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        batches = self._fastpack_with_images(batches)
        if self.fastpack_run.is_entered:
            self._fastpack_optimizer_step.begin(batches)
        return batches, num_items_in_batch

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.fastpack_run.plan.kind == "documents":  # TRL's packed row has no padding to count
            inputs = {"input_ids": as_one_row(inputs["attention_mask"], inputs["input_ids"])[0]}
        super()._track_num_input_tokens(inputs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        run, forward_backward = self.fastpack_run, super().training_step
        try:
            if not run.training:  # features are off
                return forward_backward(model, inputs, num_items_in_batch)
            with reduced_after(run, model), gathered_once(run):
                # Runs merged micro-batches as one row, replays graphs, and runs the step again after an out-of-memory.
                loss = self._fastpack_optimizer_step.run(forward_backward, model, inputs, num_items_in_batch)
            return loss if run.sync_free is None else run.sync_free.filtered(self, loss)
        finally:
            clear_derived(inputs)  # masks and metadata are not needed after the backward pass

    def _prepare_input(self, data: Any) -> Any:
        # If processes share a CPU, the device is "cpu:0", to which torch copies tensors on "cpu".
        if isinstance(data, PackedInputs) and self.args.device.type == "cpu" and not self.is_deepspeed_enabled:
            return data
        return super()._prepare_input(data)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        if inputs.get("position_ids") is None:
            inputs.pop("packed_batch", None)  # without its positions a row is one document, as in TRL
        run, step = self.fastpack_run, self.fastpack_run.sync_free
        if step is None or not step.takes(run, inputs, return_outputs):
            return super().compute_loss(model, unshared(inputs), return_outputs, num_items_in_batch)
        with naming_limit(self.args.max_length):
            return step.batch_loss(run, model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: Any) -> int:
        if (step := self.fastpack_run.sync_free) is not None:
            step.filter.restore()  # this is the first call after the line that reads it
        return super().floating_point_ops(inputs)

    # Not in `log`, which a rank may call on its own: flushing is a collective.
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_evaluate:
            self._fastpack_flush()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._fastpack_flush()
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._fastpack_flush()  # TRL logs the number of trained tokens with the evaluation
        outputs = super().evaluation_loop(*args, **kwargs)
        self._fastpack_flush()
        return outputs

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        stock, inputs = super().prediction_step, self._fastpack_with_images([inputs])[0]
        if not self.fastpack_run.is_entered:
            return stock(model, inputs, *args, **kwargs)
        try:
            loss, logits, labels = self._fastpack_optimizer_step.run_evaluation(
                lambda: stock(model, copy(inputs), *args, **kwargs)
            )
        finally:
            clear_derived(inputs)
        if self.fastpack_run.plan.kind == "documents" and isinstance(logits, Tensor):
            # One row as TRL's packed ones: predictions are cut and gathered by the number of rows of the data set.
            logits, labels = as_one_row(inputs["attention_mask"], logits, labels)
        return loss, logits, labels

    def _fastpack_flush(self, alone: bool = False) -> None:
        """Flush the deferred metrics. With `alone`, other ranks may not call this: do nothing in several processes."""
        accelerator = getattr(self, "accelerator", None)  # absent while SFTTrainer constructs
        step = self.fastpack_run.sync_free
        if step is not None and accelerator is not None and not (alone and accelerator.num_processes > 1):
            step.metrics.flush(self)
