"""A device that is full in the middle of a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile.layers import decoder_layers


@contextlib.contextmanager
def too_large(trainer: FastSFTTrainer, place: str, times: int) -> Iterator[list[str]]:
    """The device is full in the forward or backward pass of a middle layer, `times` times, from its third call on."""
    layer = decoder_layers(trainer.model)[1]
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

    if place == "backward":
        handle = layer.mlp.register_full_backward_hook(fail)
        try:
            yield calls
        finally:
            handle.remove()
        return
    stock = layer.mlp.forward

    def forward(*args: Any) -> Any:  # no hook: the plan would leave a hooked layer to its checkpoint
        fail()
        return stock(*args)

    layer.mlp.forward = forward
    try:
        yield calls
    finally:
        del layer.mlp.forward
