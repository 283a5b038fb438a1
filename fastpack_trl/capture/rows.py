"""The backbone of trainers that score completions, from CUDA graphs: its forward is one graph, its backward another.

Losses and metrics of these trainers are TRL's and ask the device, so no whole micro-step can be recorded as SFT's is.
What launches nearly all kernels are the decoder layers: with gradients once, and without them for the reference. Their
row is copied into static tensors, a graph is replayed, and the head reads the hidden states of the row. The graph of
the backward pass adds to the gradients of the parameters, as the recorded micro-step does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.capture.buckets import RowBuckets
from fastpack_trl.capture.decision import EAGER_STEPS, WARM_ROWS, GraphDecision
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.state import GradientBuffers, ModelState
from fastpack_trl.errors import PackingError
from fastpack_trl.lora.report import LoraReport
from fastpack_trl.model.hooks import HookWatch, hook_on_a_gradient, trained_parameters
from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.static_batch import StaticInputs, copy_row
from fastpack_trl.run import Run
from fastpack_trl.step.hostwork import ModelContents

_TRAINED, _SCORED = "trained", "scored"
"""Pools: activations of a forward with gradients wait for its backward, while a reference is scored."""


class _Backbone:
    """One backbone: what is compared of it from call to call.

    Args:
        module: whose calls are recorded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.contents = ModelContents()
        self.state, self.hooks = ModelState(self.contents), HookWatch(module)
        self.recorded: dict[bool, tuple[Any, ...]] = {}
        """State when its graphs were made, with gradients and without."""


class _Open:
    """Lives as long as the activations of a forward with gradients are needed."""


class _Key(NamedTuple):
    backbone: int
    trains: bool
    bucket: Bucket


class _Slot:
    """A bucket of one backbone, with gradients or without: static tensors and graphs."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.inputs = StaticInputs(bucket, device)
        self.warm, self.needs = 0, WARM_ROWS
        self.forward: torch.cuda.CUDAGraph | None = None
        self.backward: torch.cuda.CUDAGraph | None = None
        self.hidden: Tensor | None = None
        """(1, tokens, hidden) that the forward graph writes, without its own graph of autograd."""
        self.gradient: Tensor | None = None
        """Of `hidden`, which the backward graph reads."""

    def reset(self) -> None:
        """Drop the graphs."""
        for graph in (self.forward, self.backward):
            if graph is not None:
                graph.reset()
        self.forward = self.backward = None


class RowGraphs(GraphDecision):
    """Decides for each call of a backbone whether it runs eager, is recorded, or is replayed, and runs it.

    Args:
        run: whose trainer trains.
        device: records and replays.
        why_not: returns why calls cannot be captured as things are now; empty where they can.
        draw: returns sizes of rows as they will come; none where nothing is known of them.
        asked: see `GraphDecision`.
    """

    def __init__(
        self, run: Run, device: CudaGraphs, why_not: Callable[[], str], draw: Callable[[], list[RowSize]], *,
        asked: bool,
    ) -> None:  # fmt: skip
        super().__init__(run, device, asked=asked)
        self._draw = draw
        self._why_not, self._present_step, self._tokens = why_not, -1, 0
        self._anchor = torch.empty(0, device=run.device, requires_grad=True)
        self._backbones: dict[int, _Backbone] = {}
        self._open: weakref.ref[_Open] | None = None
        self._watching = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[_Key, _Slot] = {}
        self._buckets = RowBuckets(self._run, self._draw)
        self._buffers: GradientBuffers | None = None
        self._version: int | None = None
        for backbone in self._backbones.values():
            backbone.recorded.clear()

    @property
    def graphs(self) -> int:
        """Graphs that are there."""
        slots = self._slots.values()
        return sum(graph is not None for slot in slots for graph in (slot.forward, slot.backward))

    def hidden(self, backbone: Any, batch: PackedBatch, tokens: Tensor, others: Mapping[str, Any]) -> Tensor | None:
        """Return the hidden states of a row, (1, at least its tokens, hidden), or None where the caller runs it eager.

        Args:
            backbone: the decoder without its head.
            batch: of the row.
            tokens: (1, total_tokens) int64.
            others: keywords of the call beside those of a row.
        """
        trains = torch.is_grad_enabled()
        if self._ended or not self._run.model.training:
            return None
        watched = self._watched(backbone)
        if trains:
            self._tokens += tokens.numel()
        if trains and self._present_step != self._run.trainer.state.global_step:
            self._present_step = self._run.trainer.state.global_step
            self._begin_step()
            trained = trained_parameters(self._run.trainer.optimizer)
            if found := hook_on_a_gradient(self._run.trainer.model, trained):
                self.disable(f"{found}: remove it to have steps captured")
        if found := watched.hooks.look():
            self.disable(f"{found} does not run in a replay: remove it to have steps captured")
        if self._ended or any(value not in (None, False) for value in others.values()):
            return None
        bucket = self._bucket(batch)
        if bucket is None or (trains and self._is_open):
            return None
        state = watched.state.now(backbone)
        if not trains and watched.state.is_adapted:
            return None  # the fast LoRA layers read casts of the last forward with gradients: a graph has its own
        if watched.recorded.setdefault(trains, state) != state:
            self._model_changed()
            return None
        slot = self._slots.setdefault(_Key(id(backbone), trains, bucket), _Slot(bucket, self._run.device))
        copy_row(slot.inputs, batch, tokens)
        return self._run_slot(backbone, slot, trains)

    def _watched(self, backbone: nn.Module) -> _Backbone:
        if id(backbone) not in self._backbones:
            made = self._backbones[id(backbone)] = _Backbone(backbone)
            self._watching.enter_context(made.contents.watched())
        return self._backbones[id(backbone)]

    @property
    def _is_open(self) -> bool:
        """Whether a forward with gradients waits for its backward: its row and activations have to stay."""
        return self._open is not None and self._open() is not None

    def opened(self) -> _Open:
        """Return what is to live as long as the activations of the present forward."""
        held = _Open()
        self._open = weakref.ref(held)
        return held

    def _bucket(self, batch: PackedBatch) -> Bucket | None:
        """Return the shapes of a row; None where it runs eager in its own."""
        if self._steps_done < EAGER_STEPS or not self._run.step.is_warmed_up or not self._pays:
            return None
        if self._run.step.version != self._version:  # layers run otherwise since: compiled, kept
            if why := self._why_not():
                self.disable(why)
                return None
            self.drop()
            self._version = self._run.step.version
        bucket = self._buckets.find(RowSize.of_row(batch))
        if bucket is None or self._run.refuses_static(bucket):
            self._left_out += 1
            if self._buckets.are_outgrown():
                self._drop_graphs()
            return None
        return None if self._is_eager_turn else bucket

    def _run_slot(self, backbone: Any, slot: _Slot, trains: bool) -> Tensor | None:
        if slot.forward is None and slot.warm >= slot.needs and (self._buffers is not None or not trains):
            self._record(backbone, slot, trains)
            if self._ended:
                return None
        if slot.forward is None:
            slot.warm += 1
            self.warmed += 1
            try:
                hidden = self._static(backbone, slot)
            except PackingError as error:  # somebody asks for what a static row does not have
                self.disable(str(error))
                return None
            if hidden.grad_fn is not None:
                hidden.grad_fn.metadata["fastpack_open"] = self.opened()
            return hidden
        self.replayed += 1
        if slot.backward is not None:
            found: Tensor = _Replay.apply(self._anchor, self.opened(), slot, self._buffers)
            return found
        slot.forward.replay()
        return slot.hidden

    def _static(self, backbone: Any, slot: _Slot) -> Tensor:
        """Run the row that is in the tensors of `slot`."""
        adapters = self._run.get_state(LoraReport)
        adding_up = nullcontext() if adapters is None else adapters.adding_up()
        keywords = {name: value for name, value in slot.inputs.keywords.items() if name != "labels"}
        kind = self._run.device.type
        # Casts of weights that an earlier call made would not be in a recording, nor those of a recording elsewhere.
        autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        )
        try:
            with autocast, adding_up:
                found: Tensor = backbone(**keywords, use_cache=False).last_hidden_state
        finally:
            slot.inputs.batch.clear_derived()
        return found

    def _record(self, backbone: Any, slot: _Slot, trains: bool) -> None:
        """Record the forward of a slot, and its backward where it trains; a failure is tried once more, then said."""
        if lacks := self._device.lacks_room():
            self.disable(lacks)
            return
        self._device.prepare()
        forward = self._recorded(lambda: (self._static(backbone, slot),), slot.warm, _TRAINED if trains else _SCORED)
        if forward is None:
            slot.needs = slot.warm + 1
            return
        graph, (hidden,) = forward
        if trains:
            assert self._buffers is not None
            self._buffers.attach()
        if hidden.requires_grad:  # not where the head alone trains
            slot.gradient = torch.zeros_like(hidden)
            backward = self._recorded(lambda: _backward(hidden, slot.gradient), slot.warm, _TRAINED)
            if backward is None:
                graph.reset()
                slot.needs = slot.warm + 1
                return
            slot.backward = backward[0]
        slot.forward, slot.hidden = graph, hidden.detach()
        self.recorded += 1
        self._was_recorded()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients of a step for those that graphs add to, and end the step that is compared."""
        if self._ended:
            return
        if self.warmed and self._buffers is None:
            self._buffers = GradientBuffers(self._run.model.parameters())
        if self._turns is not None:
            self._turns.worked(self._tokens)
            self._turns.end(self.replayed, self._prepared)
        self._tokens = 0

    def finish(self) -> None:
        """Say what the run came to, and drop the graphs."""
        super().finish()
        self._watching.close()

    def drop(self) -> None:
        """Drop all graphs and buckets; they are made again from the rows that follow."""
        self._drop_graphs()
        self._forget()

    def _drop_graphs(self) -> None:
        if not self._is_open:  # else its graphs go with it
            for slot in self._slots.values():
                slot.reset()
        self._slots = {}
        self._device.forget()
        if self._turns is not None:
            self._turns.compares = False


class _Replay(torch.autograd.Function):
    """The hidden states of a slot; backward adds to the gradients of the parameters, and returns none."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, held: _Open, slot: _Slot, buffers: GradientBuffers) -> Tensor:
        """Replay the forward graph of `slot`; the anchor would have a gradient, so that backward is called."""
        assert slot.forward is not None
        assert slot.hidden is not None
        slot.forward.replay()
        ctx.held, ctx.slot, ctx.backward_graph, ctx.buffers = held, slot, slot.backward, buffers
        return slot.hidden.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.slot.gradient.copy_(grad)
        ctx.buffers.attach()
        ctx.backward_graph.replay()
        ctx.buffers.were_written()
        ctx.held = None
        return None, None, None, None


def _backward(hidden: Tensor, gradient: Tensor | None) -> tuple[Tensor, ...]:
    torch.autograd.backward(hidden, gradient)
    return ()
