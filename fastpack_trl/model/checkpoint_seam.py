"""One stack of wrappers around the checkpoint function of a layer, `_gradient_checkpointing_func`.

The function may be set at any time: by a trainer when training begins, by `activation_memory` for each layer. While a
layer has wrappers, its class has a property of that name, which stores the function in the layer and returns the stack
around it. Copies and pickles of the model contain the function only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fastpack_trl.model.changes import patch_attribute, shared
from fastpack_trl.model.facts import backbones, text_model
from fastpack_trl.model.upstream import GradientCheckpointingLayer
from fastpack_trl.model.walk import modules_of

CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute in which transformers keeps the checkpoint function of a layer."""

_STACK = "_fastpack_checkpoint"

Wrapper = Callable[..., Any]
"""Called as ``wrapper(inner, function, *args, **kwargs)``, returns ``inner(function, *args, **kwargs)``.

`inner` is the checkpoint function with the wrappers further inside. `function`, the forward of the layer with its
keywords, runs again in backward; the hidden states come first in `args`.
"""


@contextmanager
def checkpoint_wrapped(layer: nn.Module, wrapper: Wrapper) -> Iterator[None]:
    """Put `wrapper` around the checkpoint function of `layer`, set before or later, while the context is open.

    Later ones are further outside; they come and go in any order.
    """
    # Not traced: Dynamo of torch 2.11 resolves `layer.__dict__.get(CHECKPOINT)` to the property, without end.
    read = property(torch.compiler.disable(_read), _write, lambda layer: layer.__dict__.pop(CHECKPOINT))
    seam = partial(patch_attribute, type(layer), CHECKPOINT, read)
    with shared(type(layer), "_fastpack_seam", seam), shared(layer, _STACK, lambda: nullcontext(_Stack())) as stack:
        stack.append(wrapper)
        try:
            yield
        finally:
            stack.remove(wrapper)


def stock_checkpoint(layer: nn.Module) -> Any:
    """Return the checkpoint function of `layer` without our wrappers; None if it has none."""
    return layer.__dict__.get(CHECKPOINT)


def is_reentrant(checkpoint: Any) -> bool:
    """Return whether a checkpoint function is reentrant: it runs a backward pass of its own inside of backward."""
    return isinstance(checkpoint, partial) and bool(checkpoint.keywords.get("use_reentrant", True))


def checkpointable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers of `model` that transformers can checkpoint, first to last, none inside of another.

    Layers of vision and audio towers are not among them: no batch of text runs these.
    """
    layers, inside = list[GradientCheckpointingLayer](), set[nn.Module]()
    decoder: nn.Module = [text_model(model), *backbones(model)][-1]
    for module in modules_of(decoder):
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(modules_of(module))
    return layers


def checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers of `model` that are checkpointed in training, first to last."""
    return [each for each in checkpointable_layers(model) if each.gradient_checkpointing and stock_checkpoint(each)]


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that checkpoint if ``gradient_checkpointing`` is set: layers, or decoders of plain ones."""
    layers = {module for module in modules_of(model) if isinstance(module, GradientCheckpointingLayer)}
    flagged = [module for module in modules_of(model) if hasattr(module, "gradient_checkpointing")]
    return [module for module in flagged if module in layers or layers.isdisjoint(modules_of(module))]


def checkpoints_reentrantly(module: Any) -> bool:
    """Return whether a module of `checkpointing_modules` is currently set to reentrant checkpointing."""
    return bool(module.gradient_checkpointing) and is_reentrant(stock_checkpoint(module))


def layer_keywords(function: Any) -> dict[str, Any]:
    """Return the keywords of the layer in the function of its checkpoint, which wrappers may have put into theirs.

    ``partial(theirs, ..., partial(forward, layer, **keywords))`` -> ``keywords``
    """
    while isinstance(function, partial) and not function.keywords:
        function = function.args[-1] if function.args else function.func
    return function.keywords if isinstance(function, partial) else {}


class _Stack(list[Wrapper]):
    """The wrappers of one layer, innermost first; `wrapped` is what its property has returned last."""

    wrapped: _Wrapped | None = None


class _Wrapped:
    """A checkpoint function inside of the wrappers that its layer has when it is called."""

    def __init__(self, stack: _Stack, stock: Callable[..., Any]) -> None:
        self.stack, self.stock = stack, stock

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self.stock
        if self.stack.wrapped is self:  # otherwise other code wrapped this one: the stack is around its wrapper
            for wrapper in self.stack:
                call = partial(wrapper, call)
        return call(function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self.stock,)


def _read(layer: nn.Module) -> Any:
    if CHECKPOINT not in layer.__dict__:
        raise AttributeError(CHECKPOINT)
    stock, patch = stock_checkpoint(layer), layer.__dict__.get(_STACK)
    if patch is None:
        return stock
    stack: _Stack = patch.value[0]
    if stack.wrapped is None or stack.wrapped.stock is not stock:  # kept: each read gives the same object
        stack.wrapped = _Wrapped(stack, stock)
    return stack.wrapped


def _write(layer: nn.Module, function: Any) -> None:
    layer.__dict__[CHECKPOINT] = function.stock if isinstance(function, _Wrapped) else function
