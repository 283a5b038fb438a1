"""A device that is full in the middle of a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.checkpoint_seam import checkpointable_layers


class InBackward(torch.autograd.Function):
    """Nothing but a call of `then`, with the gradient, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[Tensor], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.then(grad)
        return grad, None


@contextlib.contextmanager
def too_large(trainer: FastSFTTrainer, place: str, times: int) -> Iterator[list[str]]:
    """The device is full in the forward or backward pass of a middle layer, `times` times, from its third call on."""
    layer: Any = checkpointable_layers(trainer.model)[1]
    calls: list[str] = []
    seen = 0

    def fail(*args: Any) -> None:
        nonlocal seen
        if not layer.training or not hasattr(layer, "_gradient_checkpointing_func") or not trainer.state.max_steps:
            return
        seen += 1
        if seen >= 3 and len(calls) < times:
            calls.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(hidden: Tensor) -> Any:  # no hook: the plan would leave a hooked layer to its checkpoint
        if place == "forward":
            fail()
        return stock(InBackward.apply(hidden, fail) if place == "backward" else hidden)

    stock, layer.mlp.forward = layer.mlp.forward, forward
    try:
        yield calls
    finally:
        del layer.mlp.forward
