"""One bucket of one backbone: static tensors, graphs of forward and backward, their replay, and the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.static_batch import Form, StaticInputs
from fastpack_trl.run import Run

_TRAINED, _SCORED = "trained", "scored"
"""Memory pools: activations of a forward with gradients wait for its backward while a reference is scored."""


class Key(NamedTuple):
    """What the graphs of a slot are for."""

    backbone: int
    trains: bool
    routes: bool
    """Router logits are outputs."""
    bucket: Bucket
    form: Form


class GradientBuffers:
    """One tensor per parameter, which is its ``.grad`` from the first micro-batch of a step on.

    A parameter without a gradient has none here either: to an optimizer zeros are not None, AdamW would decay the
    parameter.

    Args:
        parameters: with the gradients of an eager micro-batch, which become the buffers; the others are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self._buffers = [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def attach(self) -> None:
        """Make each buffer the gradient of its parameter, with its present value, or zeros if it has none."""
        fresh: list[Tensor] = []
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            gradient = parameter.grad
            if gradient is buffer or not parameter.requires_grad:  # frozen since: zeros are not None to an optimizer
                continue
            if gradient is None:
                fresh.append(buffer)
            else:  # set by an eager micro-batch, or by a callback
                buffer.copy_(gradient)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)

    def were_written(self) -> None:
        """Count a replay as an edit of each gradient, as a backward pass does (autograd checks it)."""
        torch.autograd.graph.increment_version(self._buffers)


class Open:
    """Lives as long as the activations of a forward with gradients are needed."""


class Slot:
    """Static tensors of a bucket, with gradients or without, and graphs.

    Attributes:
        warm: number of rows that ran eagerly in these tensors.
        needs: number of rows that have to, before it is recorded.
    """

    def __init__(self, run: Run, backbone: Any, key: Key, others: Mapping[str, Any], needs: int) -> None:
        """`others`: router logits, and keywords without effect, as PEFT adds."""
        self.inputs = StaticInputs(key.bucket, run.device, key.form)
        self._run, self._backbone, self._key, self._others = run, backbone, key, dict(others)
        self.warm, self.needs = 0, needs
        self.forward: torch.cuda.CUDAGraph | None = None
        self.backward: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()
        """Hidden states and router logits that the forward graph writes, without a graph of autograd."""
        self.gradients: tuple[Tensor | None, ...] = ()
        """Their gradients, which the backward graph reads; None of an output that needs none."""
        self.row_gradient: tuple[Tensor, ...] = ()
        """The gradient of the row's embeddings, which the backward graph writes; empty if they need none."""

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return (self.forward is not None) + (self.backward is not None)

    def run_eagerly(self, embeddings: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run the row that is in the tensors; return hidden states and router logits.

        `embeddings` are those in the tensors, with the autograd graph that made them.

        Raises:
            PackingError: something reads a value that a static row does not have.
        """
        adapters = self._run.lora
        adding_up = nullcontext() if adapters is None else adapters.adding_up()
        kind = self._run.device.type
        # Casts of weights that an earlier call made would not be in a recording, nor those of a recording elsewhere.
        autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        )
        row = {} if embeddings is None else {"inputs_embeds": embeddings}
        try:
            with autocast, adding_up:
                outputs = self._backbone(**self.inputs.keywords | row, **self._others, use_cache=False)
        finally:
            self.inputs.batch.clear_derived()
        routers = getattr(outputs, "router_logits", None) if self._key.routes else None
        return outputs.last_hidden_state, *(routers or ())

    def record(self, device: CudaGraphs, buffers: GradientBuffers | None) -> None:
        """Record the forward, and at once the backward, which adds to `buffers` and frees the memory of the forward."""
        device.prepare()
        pool = _TRAINED if self._key.trains else _SCORED
        graph, outputs = device.record(self.run_eagerly, pool)
        trained = [output for output in outputs if output.requires_grad]  # none if the head alone trains
        gradients = [torch.zeros_like(output) for output in trained]
        if trained:
            assert buffers is not None
            buffers.attach()
            try:
                self.backward, self.row_gradient = device.record(
                    lambda: _backward(trained, gradients, self.inputs.tokens), pool
                )
            except BaseException:
                graph.reset()
                raise
        made = iter(gradients)
        self.gradients = tuple(next(made) if output.requires_grad else None for output in outputs)
        self.forward, self.outputs = graph, tuple(output.detach() for output in outputs)

    def replay(self, anchor: Tensor, held: Open, buffers: GradientBuffers | None, row: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward graph; return the outputs for the row of these ids or embeddings.

        `anchor` requires a gradient, so that backward is called. It adds to `buffers`, and `held` is kept until then.
        """
        assert self.forward is not None
        if self.backward is not None:
            replayed: tuple[Tensor, ...] = _Replay.apply(anchor, row, held, self, buffers)
            return replayed
        self.forward.replay()
        return of_row(self.outputs, row.shape[1])

    def reset(self) -> None:
        """Drop the graphs."""
        for graph in (self.forward, self.backward):
            if graph is not None:
                graph.reset()
        self.forward = self.backward = None
        self.outputs = self.gradients = self.row_gradient = ()  # they hold memory of the pools


class _Replay(torch.autograd.Function):
    """The outputs of a slot for its row; backward adds to the gradients of parameters, and returns that of the row."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, row: Tensor, held: Open, slot: Slot, buffers: GradientBuffers
    ) -> tuple[Tensor, ...]:
        assert slot.forward is not None
        slot.forward.replay()
        ctx.held, ctx.slot, ctx.backward_graph, ctx.buffers = held, slot, slot.backward, buffers
        ctx.tokens, ctx.row_gradient = row.shape[1], slot.row_gradient
        ctx.set_materialize_grads(False)
        return of_row(slot.outputs, ctx.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for static, given in zip(ctx.slot.gradients, gradients, strict=True):
            if static is None:
                continue
            dim, tokens = static.dim() - 2, 0 if given is None else ctx.tokens
            if given is not None:
                static.narrow(dim, 0, tokens).copy_(given)
            if tokens < static.shape[dim]:  # the tail has no loss
                static.narrow(dim, tokens, static.shape[dim] - tokens).zero_()
        ctx.buffers.attach()
        ctx.backward_graph.replay()
        ctx.buffers.were_written()
        ctx.held = None
        # A copy, because autograd may keep it as it is, and the next replay overwrites the source.
        row = of_row(ctx.row_gradient, ctx.tokens)[0].clone() if ctx.row_gradient else None
        return None, row, None, None, None


def of_row(outputs: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
    """Return what outputs have for the tokens of a row, without the tail of its bucket."""
    return tuple(output.narrow(output.dim() - 2, 0, tokens) for output in outputs)


def _backward(outputs: list[Tensor], gradients: list[Tensor], row: Tensor) -> tuple[Tensor, ...]:
    """Run backward; return the gradient of a row that needs one: each replay makes it anew, and adds to nothing."""
    row.grad = None
    torch.autograd.backward(outputs, gradients)
    made, row.grad = row.grad, None
    return () if made is None else (made,)
