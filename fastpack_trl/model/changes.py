"""Reversible changes to objects of other libraries: attributes, a trainer's callbacks, runs without side effects."""

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
from transformers.utils import logging

from fastpack_trl.model.hooks import users_hooks_off
from fastpack_trl.model.sharded import local
from fastpack_trl.model.walk import modules_of, parameters_of
from fastpack_trl.model.zeros import have_values

logger = logging.get_logger(__name__)
_T = TypeVar("_T")
_NONE = object()
_LARGEST_STATE = 2**16
"""Integers of a buffer above which it is a mask or the weight of a quantized layer, which no forward pass writes."""


@contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, but no property, while the context is open; a value that other code sets meanwhile stays.

    The ``__setattr__`` of an object is bypassed: that of a compiled model writes to the model inside.
    """
    before = vars(owner).get(name, _NONE)
    kind: Any = type(owner) if isinstance(owner, type | ModuleType) else object
    kind.__setattr__(owner, name, value)
    try:
        yield
    finally:
        is_ours = vars(owner).get(name, _NONE) is value
        if is_ours and before is _NONE:
            kind.__delattr__(owner, name)
        elif is_ours:
            kind.__setattr__(owner, name, before)


@contextmanager
def restore_attributes(owners: Iterable[Any], name: str) -> Iterator[None]:
    """Restore an attribute of each of `owners` on exit."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        yield
    finally:
        for owner, value in reversed(before):
            setattr(owner, name, value)


class Patch:
    """Keeps a value alive on another object, such as a context that restores when it is collected; copies have None."""

    def __init__(self, value: Any) -> None:
        self.value, self.holders = value, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def remarked(modules: Iterable[nn.Module], remark: Callable[[str], object]) -> Iterator[None]:
    """Have `hand_over` of `modules` call `remark` instead of the log."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch_attribute(module, "_fastpack_remark", Patch(remark)))
        yield


def hand_over(module: nn.Module, feature: str, reason: str) -> None:
    """Report that the library's own code runs a call of a module with a fast forward."""
    if not torch.compiler.is_compiling():
        patch = vars(module).get("_fastpack_remark")
        patch.value(reason) if patch is not None else logger.warning_once(f"{feature}: {reason}")


@contextmanager
def shared(owner: Any, name: str, install: Callable[[], AbstractContextManager[_T]]) -> Iterator[_T]:
    """Enter `install` for the first holder and leave it with the last; `owner` holds the `Patch` under `name`."""
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
    """Silence a FutureWarning: transformers 5.23 renamed a property of models that PEFT 0.21 and TRL 1.16 read."""
    renamed = vars(PreTrainedModel).get("is_activation_checkpointing")
    if renamed is None:
        return nullcontext()
    answer = property(lambda model: model.is_activation_checkpointing)  # as a subclass has it
    patch = partial(patch_attribute, PreTrainedModel, "is_gradient_checkpointing", answer)
    return shared(PreTrainedModel, "_fastpack_checkpointing_name", patch)


@contextmanager
def callbacks_added(trainer: Trainer, *callbacks: TrainerCallback) -> Iterator[None]:
    """Let `trainer` call `callbacks` after its own until the context ends."""
    with ExitStack() as stack:
        for callback in callbacks:
            trainer.add_callback(callback)
            stack.callback(trainer.remove_callback, callback)
        yield


def during_training(trainer: Trainer, *, at_begin: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `at_begin` when training begins, in every process: the model is placed and a checkpoint is loaded."""

    class Begins(TrainerCallback):  # a new class for each call: transformers warns of two callbacks of one class
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            at_begin()

    return callbacks_added(trainer, Begins())


def callers(method: Any = None) -> Iterator[Any]:
    """Yield the `self` of each method, or of `method` alone, that is running, innermost first: no event passes it."""
    code, frame = getattr(method, "__code__", None), inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals and code in (None, frame.f_code):
            yield frame.f_locals["self"]
        frame = frame.f_back


@contextmanager
def isolated_run(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of `model` and disable user hooks; exit restores modes, random states and buffers."""
    devices = sorted({p.device.index or 0 for p in parameters_of(model) if p.device.type == "cuda"})
    modes = restore_attributes(modules_of(model), "training")
    with modes, users_hooks_off(model), torch.random.fork_rng(devices=devices), restore_buffers(model):
        model.train(training)
        yield


@contextmanager
def zeros_perturbed(model: nn.Module) -> Iterator[None]:
    """Fill trainable tensors that are all zero with small numbers, the same each time; exit restores every bit.

    A branch behind a zero gate has no effect before it is trained. Buffers stay, in which zero may have a meaning.
    """
    # Through `data` autograd sees no write.
    held = [local(p).data for p in parameters_of(model) if p.requires_grad and p.is_floating_point()]
    held = [tensor for tensor in held if type(tensor) is Tensor and tensor.numel() and not tensor.is_meta]
    zeros = [tensor for tensor, known in zip(held, have_values(held), strict=True) if not known]
    contents = [tensor.clone() for tensor in zeros]  # before any write: parameters may share memory
    # Casts of adapters are good for a version of the parameters, which stays.
    casts = [(own, own["fastpack_cast"]) for module in modules_of(model) if "fastpack_cast" in (own := vars(module))]
    try:
        for tensor in zeros:
            tensor.normal_(0, 0.02, generator=torch.Generator(tensor.device).manual_seed(0))
            tensor[(0,) * tensor.dim()] = 0.02  # positive: a ReLU would close a single gate
        yield
    finally:
        for tensor, content in zip(zeros, contents, strict=True):
            tensor.copy_(content)
        for own, cast in casts:
            own["fastpack_cast"] = cast


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` on exit: the same tensors with the same content, large integers left out."""
    before = {module: dict(module._buffers) for module in modules_of(model)}
    # The length for which the buffer of a rotary embedding was made.
    rotary = {module: dict(vars(module)) for module in before if "rope_type" in vars(module)}
    tensors = (tensor for buffers in before.values() for tensor in buffers.values() if tensor is not None)
    small = (one for one in tensors if one.numel() <= _LARGEST_STATE or (one.is_floating_point() and one.itemsize > 1))
    contents: list[Any] = [(tensor, local(tensor).clone()) for tensor in small]
    try:
        yield
    finally:
        for module, state in rotary.items():
            vars(module).update({name: n for name, n in state.items() if isinstance(n, int | float | Tensor)})
        for module, buffers in before.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in contents:
                if local(tensor).shape != content.shape:  # some observers resize
                    tensor.resize_(content.shape)
                # Through `data` autograd sees no write: a graph that has saved the buffer stays valid.
                local(tensor).data.copy_(content)
