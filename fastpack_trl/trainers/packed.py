"""`PackedTrainer`: trainers that score completions, on rows without padding in which each prompt is once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.model.changes import patch_attribute, restore_attributes
from fastpack_trl.model.facts import position_use, text_model
from fastpack_trl.model.preflight import check_adapters
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.packing.batching import BatchPlan, plan_prompt_groups
from fastpack_trl.packing.examples import dropped
from fastpack_trl.packing.prompt_groups import KEY, PromptGroups, PromptGroupsCollator
from fastpack_trl.step.token_logps import Rows
from fastpack_trl.trainers.adapter_switch import quick_switch
from fastpack_trl.trainers.featured import FeaturedTrainer, naming_faults


class PackedTrainer(FeaturedTrainer):
    """A trainer of TRL whose batches become rows; its losses, metrics, data, generation and files are TRL's.

    If rows are unsupported, TRL's padded batches run, with the reason in `fastpack_report`. ``FASTPACK_DISABLE=1``
    disables all features.
    """

    padding_free = False  # as features ask every trainer; only SFT and DPO have it
    data_collator: Any  # set by transformers' Trainer; swapped while a loader is built

    def _fastpack_constructing(self, given: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        check_adapters(given.get("model"), given.get("args"))
        rows = self._fastpack_rows = Rows()
        self.fastpack_run.backbone = rows.call_backbone

        def adding_rows(add: Callable[..., None]) -> Callable[..., None]:
            def add_and_lay(model: Any, *args: Any, **kwargs: Any) -> None:
                add(model, *args, **kwargs)
                rows.lay(model)

            return add_and_lay

        # Before accelerate wraps a reference model.
        return _replaced(self._fastpack_of.stock, "add_fused_lm_head", adding_rows)

    def _fastpack_replace_forward(self) -> None:
        if (model := text_model(self.model)) not in self._fastpack_rows.forwards:
            self._fastpack_rows.lay(model)

    def _fastpack_plan(self, trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
        forward = self._fastpack_rows.forwards.get(text_model(trainer.model))
        head = "the model was replaced" if forward is None else forward.head
        return (
            BatchPlan("stock", head) if isinstance(head, str) else plan_prompt_groups(trainer, path, flattens, unproven)
        )

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        run = self.fastpack_run
        by_longest = position_use(run.model, getattr(self, "ref_model", None)).by_longest
        self._fastpack_rows.form = {"share": run.shares_prefixes, "keep_width": by_longest}
        self._fastpack_forget_loaders((run.plan, self._fastpack_rows.form))
        if run.packs:
            forward = self._fastpack_rows.forwards[text_model(self.model)]
            self._fastpack_rows.head_trains = any(
                isinstance(part, Tensor) and part.requires_grad for part in forward.head
            )
            stack.enter_context(forward.running())
            _run_reference(self, stack)
        # Calls of the reference leave the plan of the activations.
        stack.enter_context(_replaced(self._fastpack_of.stock, "disable_gradient_checkpointing", lambda _: _pause))
        if run.training and run.ranks.count == 1 and not (run.is_sharded or run.is_deepspeed or self.args.n_gpu > 1):
            stack.enter_context(self.fastpack_run.host.running(self))
            stack.enter_context(quick_switch(self.model, self.fastpack_run.host.contents))

    def _prepare_dataset(self, *given: Any) -> Any:
        """Prepare a data set as TRL does for completions; its prompt-only trainers prepare none."""
        stock = super()._prepare_dataset
        prepared = naming_faults(self, stock, stock, *given)
        if not self.fastpack_run.disabled and (lost := dropped(prepared, given[0], given[2].max_length, given[-1])):
            self.fastpack_report.facts[f"{given[-1]} examples"] = lost
        return prepared

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        sends = self.args.accelerator_config.dispatch_batches is not False and self.fastpack_run.ranks.count > 1
        if sends and isinstance(dataset, IterableDataset | torch.utils.data.IterableDataset):
            said = "padded by TRL if accelerate sends the batches of a stream to all processes (dispatch_batches)"
            self.fastpack_report.remark("batches", said)
            return super()._get_dataloader(dataset, description, *args, **kwargs)
        with self._fastpack_collating():
            return super()._get_dataloader(dataset, description, *args, **kwargs)

    @contextlib.contextmanager
    def _fastpack_collating(self) -> Iterator[None]:
        """Let a loader that is built in the context find the rows of its batches, in its workers."""
        find = self._fastpack_find()
        if not self.fastpack_run.is_entered or not self.fastpack_run.packs or find is None:
            yield
            return
        collator = PromptGroupsCollator(self.data_collator, find, self._fastpack_rows.form)
        with patch_attribute(self, "data_collator", collator):
            yield

    def _fastpack_find(self) -> Callable[..., PromptGroups | str] | None:
        """Return the function that finds the row of a collated batch; None without a collator."""
        return None

    @contextlib.contextmanager
    def _fastpack_on_rows(self, inputs: Any) -> Iterator[None]:
        """Run what is called with the padded tensors of `inputs` on the rows that were found in them."""
        found = inputs.pop(KEY, {}) if isinstance(inputs, dict) else {}
        with self._fastpack_knowing((inputs.get(key), each) for key, each in found.items()):
            yield

    @contextlib.contextmanager
    def _fastpack_knowing(self, found: Iterable[tuple[Any, PromptGroups | str]]) -> Iterator[None]:
        """Register the rows of padded token ids; a text is the reason why some have none, which is reported."""
        if not self.fastpack_run.is_entered:
            yield
            return
        known = []
        for ids, groups in found:
            if isinstance(groups, str):
                self.fastpack_report.remark("batches", f"padded by TRL if there is {groups}")
            elif ids is not None:
                known.append((ids, groups))
        missed = self._fastpack_rows.missed
        with self._fastpack_rows.of(known):
            yield
        if self._fastpack_rows.missed > missed:
            self.fastpack_report.remark("batches", "padded by TRL if a model gets tokens that no batch has")

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss, with the model on rows."""
        with self._fastpack_on_rows(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _run_reference(trainer: PackedTrainer, stack: contextlib.ExitStack) -> None:
    """Run the reference model on rows too, if there is one that can."""
    run, reference = trainer.fastpack_run, getattr(trainer, "ref_model", None)
    forward = None if reference is None else trainer._fastpack_rows.forwards.get(text_model(reference))
    if forward is None:
        return
    try:
        keywords: Any = {"compute_dtype": run.compute_dtype, "vision_tower": False}
        stack.enter_context(packed_attention(text_model(reference), run.choice.path, **keywords))
        stack.enter_context(forward.running())
        if any(hasattr(module, "_fastpack_moe") for module in run.model.modules()):
            stack.enter_context(apply_moe(reference))  # equal models round alike
    except ValueError as error:
        run.report.remark("batches", f"padded by TRL for the reference model: {error}")


def _replaced(stock: type[Any], name: str, make: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Replace a function in the module of a trainer of TRL, if it has it."""
    module = sys.modules[stock.__module__]
    function = getattr(module, name, None)
    return contextlib.nullcontext() if function is None else patch_attribute(module, name, make(function))


@contextlib.contextmanager
def _pause(model: Any, *_: Any) -> Iterator[None]:
    """Switch the checkpointing of each layer off, and back to what it was: TRL's own would switch it on in all."""
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    with contextlib.ExitStack() as paused:
        paused.enter_context(restore_attributes(layers, "gradient_checkpointing"))
        for layer in layers:
            paused.enter_context(patch_attribute(layer, "gradient_checkpointing", False))
        yield
