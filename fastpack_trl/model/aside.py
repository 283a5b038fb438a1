"""Runs of a model beside its training: modes, random states and buffers are as before, and no hook of the user runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fastpack_trl.model.hooks import users_hooks_off
from fastpack_trl.model.patches import attributes_kept
from fastpack_trl.model.sharded import local

_LARGEST_STATE = 2**16  # integers; more are weights of a quantised layer, or a mask, which no forward pass writes


@contextmanager
def run_aside(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put `model` in training or in evaluation mode for runs that its training must not notice.

    Afterwards, also after an exception, every module's mode, every random state and every buffer is as before.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    modes = attributes_kept(model.modules(), "training")
    with modes, users_hooks_off(model), torch.random.fork_rng(devices=devices), buffers_kept(model):
        model.train(training)
        yield


@contextmanager
def buffers_kept(*models: nn.Module) -> Iterator[None]:
    """Give every buffer of `models` back what it holds now: running statistics, power iterations, counters.

    The tensors stay the same objects. Left out are large integer and 8-bit buffers: weights of quantised layers.
    """
    with ExitStack() as stack:
        for module in {module for model in models for module in model.modules()}:
            buffers = dict(module._buffers)
            stack.callback(_put_back, module, buffers, list(_copies(buffers.values())))
        yield


def _copies(buffers: Iterable[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the buffers that a forward pass may write, each with a copy of what it holds."""
    for tensor in buffers:
        # Outside of inference mode torch writes to no tensor that was made in it.
        if tensor is None or tensor.is_inference() or _is_weight(tensor):
            continue
        try:
            yield tensor, local(tensor).clone()
        except (TypeError, NotImplementedError):
            continue  # a tensor of a kind that cannot be copied cannot be written to either


def _is_weight(tensor: Tensor) -> bool:
    return tensor.numel() > _LARGEST_STATE and (not tensor.is_floating_point() or tensor.element_size() == 1)


def _put_back(module: nn.Module, buffers: dict[str, Tensor | None], copies: list[tuple[Tensor, Tensor]]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
    for tensor, content in copies:
        part = local(tensor)
        if part.shape != content.shape:  # some observers resize
            with torch.no_grad():
                tensor.resize_(content.shape)
            part = local(tensor)
        # Through `data` autograd sees no write: what it has kept of the buffer is what is there again.
        part.data.copy_(content)
