"""The backbone of a model from CUDA graphs: its forward is one graph, its backward another; the same for all trainers.

The decoder layers launch nearly all kernels of a micro-batch. A row is copied into static tensors
(`packing.static_batch`), the forward graph is replayed, and the head reads the hidden states of the row. The backward
graph adds to the gradients of the parameters. Head, loss, metrics, clipping and optimizer stay eager: the host launches
head and loss while the device runs the forward graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.capture.buckets import Draw, RowBuckets
from fastpack_trl.capture.decision import WARM_ROWS, GraphDecision
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.state import GradientBuffers, ModelState
from fastpack_trl.errors import PackingError
from fastpack_trl.lora.report import LoraReport
from fastpack_trl.model.hooks import HookWatch, hook_on_a_gradient, replaced_methods, trained_parameters
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.static_batch import StaticInputs
from fastpack_trl.run import Run
from fastpack_trl.step.backbone import ROUTER_LOGITS, RowOutputs
from fastpack_trl.step.hostwork import ModelContents

_TRAINED, _SCORED = "trained", "scored"
"""Memory pools: activations of a forward with gradients wait for its backward while a reference is scored."""
PATIENCE = 4
"""Rows of a bucket for which its recording waits for a larger bucket's."""
LOSS_METHODS = ("compute_loss", "training_step")
"""Methods of a trainer that may keep hidden states, which the next replay overwrites, or differentiate twice."""


class _Backbone:
    """What is compared of one backbone from call to call."""

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
    routes: bool
    """Router logits are outputs."""
    bucket: Bucket


class _Slot:
    """A bucket of one backbone, with gradients or without: static tensors and graphs."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.inputs = StaticInputs(bucket, device)
        self.warm, self.needs = 0, WARM_ROWS
        self.forward: torch.cuda.CUDAGraph | None = None
        self.backward: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()
        """Hidden states and router logits that the forward graph writes, without a graph of autograd."""
        self.gradients: tuple[Tensor | None, ...] = ()
        """Their gradients, which the backward graph reads; None of an output that needs none."""

    def reset(self) -> None:
        """Drop the graphs."""
        for graph in (self.forward, self.backward):
            if graph is not None:
                graph.reset()
        self.forward = self.backward = None


class BackboneGraphs(GraphDecision):
    """Decides for each call of a backbone whether it runs eagerly, is recorded, or is replayed, and runs it.

    Args:
        run: whose trainer trains.
        device: records and replays.
        why_not: returns why calls cannot be captured as things are now; empty if they can.
        draw: returns sizes of rows.
        asked: see `GraphDecision`.
    """

    def __init__(self, run: Run, device: CudaGraphs, why_not: Callable[[], str], draw: Draw, *, asked: bool) -> None:
        super().__init__(run, device, asked=asked)
        self._draw, self._why_not = draw, why_not
        self._anchor = torch.empty(0, device=run.device, requires_grad=True)
        self._backbones: dict[int, _Backbone] = {}
        self._open: weakref.ref[_Open] | None = None
        self._watching = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[_Key, _Slot] = {}
        self._buckets = RowBuckets(self._draw)
        self._buffers: GradientBuffers | None = None
        self._version: int | None = None
        for backbone in self._backbones.values():
            backbone.recorded.clear()

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        slots = self._slots.values()
        return sum(graph is not None for slot in slots for graph in (slot.forward, slot.backward))

    def run(self, backbone: Any, batch: PackedBatch, tokens: Tensor, others: Mapping[str, Any]) -> RowOutputs | None:
        """Return the outputs of a row, or None if the caller has to run it eagerly.

        Args:
            backbone: the decoder without its head.
            batch: of the row.
            tokens: (1, total_tokens) int64.
            others: keywords of the call besides those of a row.
        """
        trains = torch.is_grad_enabled()
        if self._ended or not self._run.model.training:
            return None
        watched = self._watched_of(backbone)
        self._look_for_watchers(watched, begins=trains and self._begins_step())
        if self._ended or _has_extras(others):
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
        key = _Key(id(backbone), trains, bool(others.get(ROUTER_LOGITS)), bucket)
        slot = self._slots.setdefault(key, _Slot(bucket, self._run.device))
        slot.inputs.copy_row(batch, tokens)
        outputs = self._run_slot(backbone, slot, key, tokens.numel())
        return None if outputs is None else RowOutputs(outputs[0], outputs[1:] or None)

    def _look_for_watchers(self, watched: _Backbone, begins: bool) -> None:
        """End the feature if code of the user that came since sees layers, gradients or losses."""
        hook, trainer = watched.hooks.look(), self._run.trainer
        if begins:
            hook = hook or hook_on_a_gradient(trainer.model, trained_parameters(trainer.optimizer))
            hook = hook or replaced_methods(trainer, LOSS_METHODS)
        if hook:
            self.disable(f"{hook} does not run in a replay: remove it to have steps captured")

    def _watched_of(self, backbone: nn.Module) -> _Backbone:
        if id(backbone) not in self._backbones:
            made = self._backbones[id(backbone)] = _Backbone(backbone)
            self._watching.enter_context(made.contents.watched())
        return self._backbones[id(backbone)]

    @property
    def _is_open(self) -> bool:
        """Whether a forward with gradients waits for its backward: its row and activations have to stay."""
        return self._open is not None and self._open() is not None

    def _opened(self) -> _Open:
        """Return an object that lives as long as the activations of the present forward."""
        held = _Open()
        self._open = weakref.ref(held)
        return held

    def _bucket(self, batch: PackedBatch) -> Bucket | None:
        """Return the shapes of a row; None if it runs eagerly in its own."""
        if not self._is_settled or not self._pays:
            return None
        if self._run.step.version != self._version:  # layers run otherwise since: compiled, kept
            if why := self._why_not():
                self.disable(why)
                return None
            self.drop()
            self._version = self._run.step.version
        bucket = self._buckets.find(Bucket.of(batch), max(1, len(batch.parts)))
        if bucket is None or self._run.refuses_static(bucket):
            if self._buckets.are_outgrown():
                self._drop_graphs()
            return None
        return bucket

    def _run_slot(self, backbone: Any, slot: _Slot, key: _Key, tokens: int) -> tuple[Tensor, ...] | None:
        """Run the row that was copied into `slot`; None if that has to be done eagerly."""
        if slot.forward is None and self._is_due(slot, key) and (self._buffers is not None or not key.trains):
            self._record(backbone, slot, key)
            if self._ended:
                return None
        if slot.forward is None:
            slot.warm += 1
            self.warmed += 1
            try:
                outputs = self._static(backbone, slot, key.routes)
            except PackingError as error:  # something asks for what a static row does not have
                self.disable(str(error))
                return None
            if outputs[0].grad_fn is not None:
                outputs[0].grad_fn.metadata["fastpack_open"] = self._opened()
        else:
            self.replayed += 1
            if slot.backward is not None:
                replayed: tuple[Tensor, ...] = _Replay.apply(self._anchor, self._opened(), slot, self._buffers, tokens)
                return replayed
            slot.forward.replay()
            outputs = slot.outputs
        return tuple(_of_row(output, tokens) for output in outputs)

    def _is_due(self, slot: _Slot, key: _Key) -> bool:
        """Return whether a slot is to be recorded; larger buckets go first for a while: others reuse their memory."""
        larger = [other for other in self._buckets.choice or () if other.tokens > key.bucket.tokens]
        slots = [self._slots.get(key._replace(bucket=other)) for other in larger]
        waits = any(other is None or other.forward is None for other in slots)
        return slot.warm >= slot.needs + PATIENCE * waits

    def _static(self, backbone: Any, slot: _Slot, routes: bool) -> tuple[Tensor, ...]:
        """Run the row that is in the tensors of `slot` eagerly."""
        adapters = self._run.get_state(LoraReport)
        adding_up = nullcontext() if adapters is None else adapters.adding_up()
        routing = {ROUTER_LOGITS: True} if routes else {}
        kind = self._run.device.type
        # Casts of weights that an earlier call made would not be in a recording, nor those of a recording elsewhere.
        autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        )
        try:
            with autocast, adding_up:
                outputs = backbone(**slot.inputs.keywords, **routing, use_cache=False)
        finally:
            slot.inputs.batch.clear_derived()
        routers = getattr(outputs, "router_logits", None) if routes else None
        return outputs.last_hidden_state, *(routers or ())

    def _record(self, backbone: Any, slot: _Slot, key: _Key) -> None:
        """Record the forward of a slot, and its backward if it trains; a failure is tried once more, then reported."""
        if lacks := self._device.lacks_room():
            self.disable(lacks)
            return
        self._device.prepare()
        pool = _TRAINED if key.trains else _SCORED
        forward = self._try_record(lambda: self._static(backbone, slot, key.routes), slot.warm, pool)
        if forward is None:
            slot.needs = slot.warm + 1
            return
        graph, outputs = forward
        trained = [output for output in outputs if output.requires_grad]  # none if the head alone trains
        gradients = [torch.zeros_like(output) for output in trained]
        if trained:
            assert self._buffers is not None
            self._buffers.attach()
            backward = self._try_record(lambda: _backward(trained, gradients), slot.warm, pool)
            if backward is None:
                graph.reset()
                slot.needs = slot.warm + 1
                return
            slot.backward = backward[0]
        made = iter(gradients)
        slot.gradients = tuple(next(made) if output.requires_grad else None for output in outputs)
        slot.forward, slot.outputs = graph, tuple(output.detach() for output in outputs)
        self.recorded += 1
        self._tell()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients of an eager step as those that graphs add to; all of its backward passes are over."""
        self._open = None  # the frames of an error may hold the tensors of a forward whose backward is over
        super().on_pre_optimizer_step(args, state, control, **kwargs)
        if not self._ended and self.warmed and self._buffers is None:
            self._buffers = GradientBuffers(self._run.model.parameters())

    def finish(self) -> None:
        """Report the run, and drop the graphs."""
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

    def _describe_rows(self) -> str:
        return str(self._buckets)


class _Replay(torch.autograd.Function):
    """The outputs of a slot for its row; backward adds to the gradients of the parameters, and returns none."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, held: _Open, slot: _Slot, buffers: GradientBuffers, tokens: int
    ) -> tuple[Tensor, ...]:
        """Replay the forward graph of `slot`; the anchor requires a gradient, so that backward is called."""
        assert slot.forward is not None
        slot.forward.replay()
        ctx.held, ctx.slot, ctx.backward_graph, ctx.buffers, ctx.tokens = held, slot, slot.backward, buffers, tokens
        ctx.set_materialize_grads(False)
        return tuple(_of_row(output, tokens) for output in slot.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Replay the backward graph on these gradients, which are zero past the row."""
        for static, given in zip(ctx.slot.gradients, gradients, strict=True):
            if static is None:
                continue
            dim, tokens = static.dim() - 2, 0 if given is None else ctx.tokens
            if given is not None:
                static.narrow(dim, 0, tokens).copy_(given)
            if tokens < static.shape[dim]:
                static.narrow(dim, tokens, static.shape[dim] - tokens).zero_()
        ctx.buffers.attach()
        ctx.backward_graph.replay()
        ctx.buffers.were_written()
        ctx.held = None
        return None, None, None, None, None


def _has_extras(others: Mapping[str, Any]) -> bool:
    """Return whether a call has keywords that a recording does not have."""
    given = [value for name, value in others.items() if name != ROUTER_LOGITS]
    return any(value is not None and value is not False for value in given)


def _of_row(output: Tensor, tokens: int) -> Tensor:
    """Return what an output has for the tokens of a row, without the tail of its bucket."""
    return output.narrow(output.dim() - 2, 0, tokens)


def _backward(outputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    torch.autograd.backward(outputs, gradients)
    return ()
