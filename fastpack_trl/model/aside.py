"""Runs of a model that its training does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fastpack_trl.model.hooks import users_hooks_off
from fastpack_trl.model.patches import restore_attributes
from fastpack_trl.model.sharded import local

_LARGEST_STATE = 2**16
"""Integers of a buffer above which it is a mask or the weight of a quantized layer, which no forward pass writes."""


@contextmanager
def isolated_run(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put `model` in training or evaluation mode, without hooks of the user.

    Afterwards, also after an exception, restore the mode of every module, the random states and the buffers.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    modes = restore_attributes(model.modules(), "training")
    with modes, users_hooks_off(model), torch.random.fork_rng(devices=devices), restore_buffers(model):
        model.train(training)
        yield


@contextmanager
def restore_buffers(*models: nn.Module) -> Iterator[None]:
    """Restore the buffers of `models` on exit: the same tensors with the same content, large integers left out."""
    before = {module: dict(module._buffers) for model in models for module in model.modules()}
    tensors = [tensor for buffers in before.values() for tensor in buffers.values() if _is_state(tensor)]
    contents = [local(tensor).clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in before.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in zip(tensors, contents, strict=True):
                if local(tensor).shape != content.shape:  # some observers resize
                    tensor.resize_(content.shape)
                # Through `data` autograd sees no write: a graph that has saved the buffer stays valid.
                local(tensor).data.copy_(content)


def _is_state(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    return tensor.numel() <= _LARGEST_STATE or (tensor.is_floating_point() and tensor.element_size() > 1)
