"""Reversible changes to foreign objects: attributes, callbacks of a trainer, runs that training does not notice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from fastpack_trl.model.hooks import users_hooks_off
from fastpack_trl.model.sharded import local

_T = TypeVar("_T")
_NONE = object()
_LARGEST_STATE = 2**16
"""Integers of a buffer above which it is a mask or the weight of a quantized layer, which no forward pass writes."""


@contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, a class or a module while the context is open.

    Exit restores what `owner` itself had, or deletes the name; a value that somebody else has set meanwhile stays.
    The ``__setattr__`` of an object is bypassed: that of a compiled model writes to the model inside. Not for a
    property, which keeps its value elsewhere.
    """
    before = vars(owner).get(name, _NONE)
    kind: Any = type(owner) if isinstance(owner, type | ModuleType) else object
    kind.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name, _NONE) is value:
            if before is _NONE:
                kind.__delattr__(owner, name)
            else:
                kind.__setattr__(owner, name, before)


@contextmanager
def restore_attributes(owners: Iterable[Any], name: str) -> Iterator[None]:
    """Restore an attribute of each of `owners` on exit, whoever has changed it."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        yield
    finally:
        for owner, value in before:
            setattr(owner, name, value)


class Patch:
    """Keeps a value alive on another object; a copy or a pickle of that object has None instead.

    A context of a generator that nobody keeps is collected, and so restores: the changed object must keep its own.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.holders = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def shared(owner: Any, name: str, install: Callable[[], AbstractContextManager[_T]]) -> Iterator[_T]:
    """Enter `install` for the first holder and leave it with the last, in whatever order they leave.

    A trainer that is made in a callback of another finds the model as it is in the middle of that one's training.
    The attribute `name` of `owner`, the object or the class that is changed, holds the `Patch`.
    """
    patch = vars(owner).get(name)
    if patch is None:
        stack = ExitStack()
        patch = Patch((stack.enter_context(install()), stack))
        setattr(owner, name, patch)
    patch.holders += 1
    try:
        yield patch.value[0]
    finally:
        patch.holders -= 1
        if not patch.holders:
            delattr(owner, name)
            patch.value[1].close()


def silence_renamed_checkpointing() -> AbstractContextManager[None]:
    """Let models answer `is_gradient_checkpointing` without a FutureWarning of transformers in the context.

    transformers 5.23 renamed the property. PEFT 0.21 and TRL 1.16 read the old name, which users cannot change.
    """
    renamed = vars(PreTrainedModel).get("is_activation_checkpointing")
    if renamed is None:
        return nullcontext()
    answer = property(lambda model: model.is_activation_checkpointing)  # as a subclass has it
    patch = partial(patch_attribute, PreTrainedModel, "is_gradient_checkpointing", answer)
    return shared(PreTrainedModel, "_fastpack_checkpointing_name", patch)


@contextmanager
def callbacks_added(trainer: Trainer, *callbacks: TrainerCallback) -> Iterator[None]:
    """Let `trainer` call `callbacks` after its own until the context ends."""
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            trainer.remove_callback(callback)


def during_training(trainer: Trainer, *, at_begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `at_begin` when training begins, in every process: the model is placed and a checkpoint is loaded."""

    class Begins(TrainerCallback):  # a new class for each call: transformers warns of two callbacks of one class
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            at_begin()

    return callbacks_added(trainer, Begins())


def callers(method: Any = None) -> Iterator[Any]:
    """Yield the `self` of each method, or of `method` alone, that is running, innermost first.

    A callback finds a trainer of TRL in this way: no event of transformers passes it.
    """
    code, frame = getattr(method, "__code__", None), inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals and code in (None, frame.f_code):
            yield frame.f_locals["self"]
        frame = frame.f_back


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
    wide = tensor is not None and tensor.is_floating_point() and tensor.element_size() > 1
    return wide or (tensor is not None and tensor.numel() <= _LARGEST_STATE)
