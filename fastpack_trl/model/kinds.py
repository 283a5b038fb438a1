"""Decoder layers of one kind: the same code over the same attributes, so that one of them shows what the others do."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.hooks import is_users
from fastpack_trl.model.walk import parameters_of
from fastpack_trl.model.zeros import have_values

_PLAIN = frozenset([bool, int, float, str, type(None), type, torch.dtype, torch.device, torch.Size])
_OPENED = (nn.Module, Tensor, dict, list, tuple, set, partial, MethodType)
_LIBRARIES = ("bitsandbytes.", "fastpack_trl.", "peft.")
"""Packages whose objects are compared by their attributes, as modules are; other objects have to be the same one."""
_SMALL = 4096
"""Numbers of a buffer up to which its values are compared."""
_EMPTY = frozenset([dict, OrderedDict, set])


def first_of_kind(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return for each of the decoder layers of `model` the first of its kind, by their place in `layers`.

    Compared are the classes, attributes, hooks and replaced forwards of all modules inside, and what a list of the
    config has for each layer; of a tensor its shape and dtype, and whether it is all zero; of small buffers the values.
    """
    base, firsts = text_model(model), dict[Any, int]()
    fields = vars(base.config.get_text_config()).values()
    lists = [value for value in fields if isinstance(value, list | tuple) and len(value) == len(layers)]
    names = {module: name for name, module in base.named_modules()}
    walks = [_Form(f"{names[layer]}.", index) for index, layer in enumerate(layers)]
    forms = [walk.of(layer) for walk, layer in zip(walks, layers, strict=True)]
    known = iter(have_values([tensor for walk in walks for tensor in walk.tensors]))
    has_values = [tuple(islice(known, len(walk.tensors))) for walk in walks]
    kinds = (
        (form, has, repr([value[index] for value in lists]))
        for index, (form, has) in enumerate(zip(forms, has_values, strict=True))
    )
    return [firsts.setdefault(kind, index) for index, kind in enumerate(kinds)]


class Kinds:
    """The kinds of the decoder layers of `model`, found once for all that ask as long as the model is the same."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layers = model, checkpointable_layers(model)

    @cached_property
    def firsts(self) -> list[int]:
        """What `first_of_kind` returns for all layers."""
        return first_of_kind(self.model, self.layers)

    @cached_property
    def stand_ins(self) -> dict[nn.Module, nn.Module]:
        """The first of its kind for each other layer; none if weights of these are not finite."""
        pairs = zip(self.layers, self.firsts, strict=True)
        others: dict[nn.Module, nn.Module] = {
            layer: self.layers[i] for layer, i in pairs if layer is not self.layers[i]
        }
        weights = [
            p.detach() for each in others for p in parameters_of(each) if p.is_floating_point() and p.itemsize > 1
        ]
        is_finite = not weights or math.isfinite(float(nn.utils.get_total_norm(weights, math.inf)))
        return others if is_finite else {}


class _Form(dict[int, Any]):
    """What was met in one layer, by id: its number and the object, else another one could get the id."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.tensors = list[Tensor]()  # in the order of the form

    def of(self, value: Any, name: Any = "") -> Any:
        """Return nested tuples that are equal for equal attributes."""
        kind: Any = type(value)
        if kind in _PLAIN:
            plain = value.replace(self.name, "") if kind is str else value
            return kind, plain - self.index if name == "layer_idx" and kind is int else plain
        if id(value) in self:
            return self[id(value)][0]
        if not (isinstance(value, _OPENED) or f"{kind.__module__}.".startswith(_LIBRARIES)):
            return kind, id(value)
        self[id(value)] = len(self), value
        if isinstance(value, dict) and "_hooks" in str(name):  # each has a number, and libraries make functions anew
            return tuple(
                id(hook) if is_users(hook) else getattr(hook, "__qualname__", type(hook)) for hook in value.values()
            )
        if isinstance(value, dict):
            # Most are constants of torch's: a call for each would take half of the time.
            forms = tuple(
                (key, each if each is None or each is False or each is True else self.of(each, key))
                for key, each in value.items()
                if type(each) not in _EMPTY or each
            )
            # A forward may decide by the values of its small buffers.
            small = [t for t in value.values() if isinstance(t, Tensor) and t.numel() <= _SMALL and not t.is_meta]
            return kind, forms, repr([t.tolist() for t in small]) if name == "_buffers" else ""
        if isinstance(value, list | tuple | set):
            return kind, (frozenset if isinstance(value, set) else tuple)(map(self.of, value))
        parts: Any = object.__getstate__(value)
        if isinstance(value, MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, partial):
            parts = value.func, value.args, value.keywords, parts
        elif isinstance(value, Tensor):
            self.tensors.append(value.detach().as_subclass(Tensor))
            kind = kind, value.shape, value.dtype, value.device, value.requires_grad
        elif isinstance(value, nn.Module) and nn.utils.parametrize.is_parametrized(value):
            kind = kind.__bases__  # torch makes a class for each
        return kind, self.of(parts)


@contextmanager
def one_of_each_kind(kinds: Kinds) -> Iterator[dict[nn.Module, nn.Module]]:
    """Run only the first decoder layer of each kind while the context is open: the others pass hidden states on.

    Yields each layer that passes on with the first of its kind. A layer that the model calls with other arguments than
    that one, as another mask, runs, and is taken out. None passes on if weights are not finite.
    """
    skipped, calls = dict(kinds.stand_ins), dict[nn.Module, Any]()

    def call(layer: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        hidden, others = (args[0], (args[1:], kwargs)) if args else (None, kwargs)  # no hidden states: the layer runs
        of_first, rest = calls.get(skipped.get(layer), (None, None))
        if hidden is not None and layer in skipped and _same(others, of_first):
            return hidden if rest is None else (hidden, *rest)
        skipped.pop(layer, None)
        out = forward(*args, **kwargs)
        calls[layer] = others, out[1:] if isinstance(out, tuple) else None
        return out

    with ExitStack() as stack:
        for layer in {**skipped, **dict.fromkeys(skipped.values())}:
            stack.enter_context(patch_attribute(layer, "forward", partial(call, layer, layer.forward)))
        yield skipped


def _same(one: Any, other: Any) -> bool:
    """Return whether two arguments are the same objects, or plain values that are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return _same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(type(one) is type(other) and type(one) in _PLAIN and one == other)
