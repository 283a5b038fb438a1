"""The micro-step (forward, loss, backward) as one CUDA graph per bucket of rows: recorded once, then replayed.

The host launches one graph where it launched thousands of kernels. A row is copied into the static tensors of its
bucket (`packing.static_batch`), the graph is replayed, and what it returned is copied out. Everything else stays eager,
with the same result: the first rows (until what compiles, plans and measures has settled), rows that fit no bucket,
evaluation, clipping, the optimizer, logging.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpack_trl.capture.buckets import RowBuckets
from fastpack_trl.capture.decision import EAGER_STEPS, WARM_ROWS, GraphDecision
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.state import GradientBuffers, ModelState
from fastpack_trl.errors import PackingError
from fastpack_trl.lora.report import LoraReport
from fastpack_trl.model.hooks import BATCH_METHODS, HookWatch, hook_on_a_gradient, replaced_methods, trained_parameters
from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.packed_inputs import PackedInputs
from fastpack_trl.packing.static_batch import StaticInputs, copy_into, is_as_collated
from fastpack_trl.run import MicroStep, Run
from fastpack_trl.step.sync_free import SyncFreeStep


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    table: Tensor


class _Slot:
    """One bucket: its static tensors, the rows that ran eager in them, and its graph."""

    def __init__(self, inputs: StaticInputs) -> None:
        self.inputs = inputs
        self.warm, self.needs = 0, WARM_ROWS
        self.recorded: _Recorded | None = None


class StepGraphs(GraphDecision):
    """Decides for each micro-batch whether it runs eager, is recorded, or is replayed, and runs it.

    Args:
        run: whose trainer trains.
        device: records and replays.
        why_not: returns why micro-steps cannot be captured as things are now; empty where they can.
        asked: recording was asked for by name: it is neither timed nor weighed against the steps that are left.
    """

    def __init__(self, run: Run, device: CudaGraphs, why_not: Callable[[], str], *, asked: bool) -> None:
        super().__init__(run, device, asked=asked)
        step = run.get_state(SyncFreeStep)
        assert step is not None
        self._step, self._state, self._why_not = step, ModelState(step.host.contents), why_not
        self._items = torch.zeros((), dtype=torch.int64, device=run.device)
        self._accumulation = torch.zeros((), dtype=torch.float32, device=run.device)
        self._present_step = -1
        self._hooks: HookWatch | None = None
        self._forget()

    @property
    def graphs(self) -> int:
        """Graphs that are there."""
        return sum(slot.recorded is not None for slot in self._slots.values())

    def _forget(self) -> None:
        self._slots: dict[Bucket, _Slot] = {}
        self._buckets = RowBuckets(self._run)
        self._buffers: GradientBuffers | None = None
        self._version: int | None = None
        self._recorded_state: tuple[Any, ...] | None = None

    def run(self, stock: MicroStep, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch as `stock`, the trainer's own step, does; return its loss."""
        loss = self._run_once(stock, model, inputs, num_items_in_batch)
        if self._turns is not None and self._turns.compares:
            self._turns.worked(sum(getattr(inputs.get("packed_batch"), "seq_lengths", ())))
        return loss

    def _run_once(self, stock: MicroStep, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        slot = self._slot(inputs) if self._may_replay(model, inputs, num_items_in_batch) else None
        if slot is not None:
            # As the trainer's own step begins; the second is for optimizers without a schedule, which evaluation has
            # switched over.
            model.train()
            if callable(switch := getattr(self._run.trainer.optimizer, "train", None)):
                switch()
            trainer = self._run.trainer
            coefficient = trainer.router_aux_loss_coef if trainer.aux_loss_enabled else None
            state = (self._state.now(self._run.model), coefficient, trainer.args.loss_type)
            self._recorded_state = self._recorded_state or state
            if state != self._recorded_state:
                self._model_changed()
                slot = None
        if self._buffers is not None and not self._is_eager_turn:  # that step is as it would be without graphs
            self._buffers.attach()
        if slot is None:
            return stock(model, inputs, num_items_in_batch)
        copy_into(slot.inputs, inputs)
        if isinstance(num_items_in_batch, Tensor):
            self._items.copy_(num_items_in_batch, non_blocking=True)
        else:
            self._items.fill_(num_items_in_batch)
        self._accumulation.fill_(self._run.trainer.current_gradient_accumulation_steps)
        if slot.recorded is not None:
            return self._replay(inputs, slot.recorded)
        return self._warm(stock, model, inputs, num_items_in_batch, slot)

    def _may_replay(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> bool:
        """Return whether a micro-batch is one of many alike; what excludes all that follow ends the feature."""
        if self._ended:
            return False
        self._hooks = self._hooks or HookWatch(model)
        found, trainer = self._hooks.look(), self._run.trainer
        if self._present_step != trainer.state.global_step:
            self._present_step = trainer.state.global_step
            self._begin_step()
            found = found or hook_on_a_gradient(trainer.model, trained_parameters(trainer.optimizer))
            found = found or replaced_methods(trainer, BATCH_METHODS)
        if found:
            self.disable(f"{found} does not run in a replay: remove it to have steps captured")
        if self.has_ended:
            return False
        return num_items_in_batch is not None and self._step.takes(self._run, inputs) and is_as_collated(inputs)

    def _slot(self, inputs: Any) -> _Slot | None:
        """Return where a row runs; None where it runs eager in its own shapes."""
        if self._steps_done < EAGER_STEPS or not self._run.step.is_warmed_up or not self._pays:
            return None
        if self._run.step.version != self._version:  # layers run otherwise since: compiled, kept, offloaded
            if why := self._why_not():
                self.disable(why)
                return None
            self.drop()
            self._version = self._run.step.version
        bucket = self._buckets.find(RowSize.of(inputs["packed_batch"]))
        if bucket is None or self._run.refuses_static(bucket):
            self._left_out += 1  # its step is compared with none
            if self._buckets.are_outgrown():
                self._drop_graphs()
            return None
        return None if self._is_eager_turn else self._slot_of(bucket)

    def _slot_of(self, bucket: Bucket) -> _Slot:
        if bucket not in self._slots:
            self._slots[bucket] = _Slot(StaticInputs(bucket, self._run.device))
        return self._slots[bucket]

    def _warm(self, stock: MicroStep, model: nn.Module, inputs: Any, num_items_in_batch: Any, slot: _Slot) -> Tensor:
        """Run a row eager in static shapes, as the graph will; then record that, if it is due.

        A failure to record comes after the micro-batch: what is run again for lack of memory is another one.
        """
        try:
            loss, table = self._static(stock, model, slot)
        except PackingError as error:  # somebody asks for what a static row does not have
            self.disable(str(error))
            return stock(model, inputs, num_items_in_batch)
        slot.warm += 1
        self.warmed += 1
        self._keep(inputs, table)
        if slot.warm >= slot.needs:
            self._buffers = self._buffers or GradientBuffers(self._run.model.parameters())
            self._record_all(stock, model, slot)
        return loss

    def _static(self, stock: MicroStep, model: nn.Module, slot: _Slot) -> tuple[Tensor, Tensor]:
        """Run the micro-batch that is in the tensors of `slot`; return its loss and figures and touch no metric."""
        adapters = self._run.get_state(LoraReport)
        adding_up = nullcontext() if adapters is None else adapters.adding_up()
        try:
            with adding_up, self._step.static_loss(self._accumulation) as figures:
                loss = stock(model, PackedInputs(slot.inputs.keywords), self._items)
        finally:
            slot.inputs.batch.clear_derived()  # made inside of a recording that failed, it is in memory that is gone
        return loss, figures.table

    def _record_all(self, stock: MicroStep, model: nn.Module, warm: _Slot) -> None:
        """Record the graph of a bucket whose kernels have run, and of those that launch the same kernels.

        These differ in documents and `max_seqlen` alone, and a recording runs nothing: no row of theirs is needed.
        """
        lacks = self._device.lacks_room()
        if lacks:
            self.disable(lacks)
            return
        self._device.prepare()
        self._record(stock, model, warm)
        for bucket in self._buckets.beside(warm.inputs.bucket) if warm.recorded is not None else ():
            slot = self._slot_of(bucket)
            if slot.recorded is None and not self._run.refuses_static(bucket) and not self._ended:
                # What would be compiled anew for it waits for a row of its own.
                with torch.compiler.set_stance("fail_on_recompile"):
                    self._record(stock, model, slot)
        self._was_recorded()

    def _record(self, stock: MicroStep, model: nn.Module, slot: _Slot) -> None:
        """Record the graph of `slot`; where that fails, it is tried again after a further row, then said."""
        recorded = self._recorded(lambda: self._static(stock, model, slot), slot.warm)
        if recorded is None:
            slot.needs = slot.warm + 1
            return
        graph, (loss, table) = recorded
        slot.recorded = _Recorded(graph, loss, table)
        self.recorded += 1

    def _replay(self, inputs: Any, recorded: _Recorded) -> Tensor:
        assert self._buffers is not None
        recorded.graph.replay()
        self._buffers.were_written()
        self.replayed += 1
        self._keep(inputs, recorded.table)
        return recorded.loss.clone()

    def _keep(self, inputs: Any, table: Tensor) -> None:
        self._step.keep(self._run.trainer, table, inputs["packed_batch"])

    def drop(self) -> None:
        """Drop all graphs and buckets; they are made again from the rows that follow."""
        self._drop_graphs()
        self._forget()

    def _drop_graphs(self) -> None:
        for slot in self._slots.values():
            if slot.recorded is not None:
                slot.recorded.graph.reset()
        self._slots = {}
        self._device.forget()
        if self._turns is not None:
            self._turns.compares = False
