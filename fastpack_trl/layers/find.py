"""One walk over a model: norms, gated MLPs and layers with a rotation, grouped by what their forward depends on."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fastpack_trl.model.facts import inside_peft, text_model
from fastpack_trl.model.hooks import has_global_hooks, is_hooked

ROTARY = "apply_rotary"
"""First letters of transformers' names for functions of (q, k, cos, sin), in the namespace of a modelling file."""
OWN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The function of the library for each replaced rotation."""
LIGER = "liger"
"""The reason of a module that Liger has patched."""
_CONSTANTS = (int, float, str, bool, type(None))
_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Modules that one proof stands for: class, forward and constants are equal, and so are dtypes and widths.

    Attributes:
        part: ``norm``, ``gate`` or ``rotary``.
        owner: the class that defines the forward.
        modules: all of them.
        rotary: for ``rotary``, modules of Python and the names of the functions there.
    """

    part: str
    owner: type
    modules: list[Any] = field(default_factory=list)
    rotary: tuple[tuple[ModuleType, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the class's name."""
        return type(self.modules[0]).__name__


def kinds_of(model: nn.Module) -> tuple[dict[Any, Kind], list[tuple[str, str, str]]]:
    """Return the kinds of a model, and part, class and reason of each module that runs its own code in any case."""
    kinds: dict[Any, Kind] = {}
    refused = []
    for wrapper in _own_modules(text_model(model)):
        module = inside_peft(wrapper) if _is_of("peft", type(wrapper)) else wrapper
        cls: Any = type(module)
        owner: Any = next(each for each in cls.__mro__ if "forward" in vars(each))
        rotary = _rotary_of(cls)
        part = "rotary" if rotary else "norm" if _is_norm(module) else "gate" if linears(module) else ""
        if not part:
            continue
        if reason := "PEFT wraps it" if module is not wrapper else _refusal(module, part, rotary):
            refused.append((part, cls.__name__, reason))
            continue
        key = (owner, rotary) if rotary else (cls, owner, owner.forward, _constants(module))
        kinds.setdefault(key, Kind(part, owner, rotary=rotary)).modules.append(module)
    return kinds, refused


def linears(module: Any) -> list[str]:
    """Return the names of the projections of a gated MLP, the one from the inner width last; empty for others.

    Gate and up are one projection or two. All other parts have no parameters.
    """
    children = {name: child for name, child in module._modules.items() if child is not None}
    names = [name for name, child in children.items() if hasattr(child, "in_features")]
    others = [child for name, child in children.items() if name not in names]
    if module._parameters or len(names) not in (2, 3) or any(next(c.parameters(), None) is not None for c in others):
        return []
    for down in reversed(names):
        outer, inner = children[down].out_features, children[down].in_features
        inward = [name for name in names if name != down]
        wanted = (outer, inner if len(inward) == 2 else 2 * inner)
        shapes = {(children[name].in_features, children[name].out_features) for name in inward}
        if shapes == {wanted} and outer != inner:  # three square projections are those of an attention
            return [*inward, down]
    return []


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, but of those that PEFT wraps the wrapper only."""
    seen, todo = set[nn.Module](), [module]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            yield module
            if not _is_of("peft", type(module)):
                todo += [child for child in reversed(module._modules.values()) if child is not None]


def _is_norm(module: Any) -> bool:
    named = any("norm" in cls.__name__.lower() for cls in type(module).__mro__)
    return named and not module._modules and all(p is None or p.dim() == 1 for p in module._parameters.values())


def _is_of(package: str, thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(f"{package}.")


def _refusal(module: Any, part: str, rotary: tuple[tuple[ModuleType, str], ...]) -> str:
    own = [vars(home)[name] for home, name in rotary] or [vars(module).get("forward"), type(module)]
    if any(_is_of("liger_kernel", each) for each in own):
        return LIGER
    if (part != "rotary" and is_hooked(module)) or (part == "gate" and hooked_inside(module)):
        return "it has hooks or a replaced forward"
    if part != "rotary" and any(b is not None for each in _parts(module) for b in each._buffers.values()):
        return "it has buffers"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled"
    quantized = any(p is not None and not p.is_floating_point() for p in module._parameters.values())
    return "its weights are quantized" if quantized else ""


def hooked_inside(module: Any) -> bool:
    """Return whether a child that a fused gate does not call has hooks or a replaced forward."""
    skipped = [child for child in module._modules.values() if not hasattr(child, "in_features")]
    return any(map(is_hooked, skipped)) or (bool(skipped) and has_global_hooks())


def _parts(module: Any) -> list[Any]:
    """Return a module and all inside of its children without parameters: not what adapters add to its projections."""
    plain = (child for child in module.children() if next(child.parameters(), None) is None)
    return [module, *itertools.chain.from_iterable(child.modules() for child in plain)]


def _constants(module: Any) -> tuple[Any, ...]:
    parts = _parts(module)
    values = [
        (name, _value(value))
        for part in parts
        for name, value in sorted(vars(part).items())
        if name not in _INTERNAL and not name.startswith("_fastpack")  # marks of another trainer
    ]
    kinds = tuple(type(child) for child in module._modules.values())
    shapes = tuple((name, p.dtype, p.shape, p.device) for name, p in module._parameters.items() if p is not None)
    return tuple(values), kinds, shapes, tuple(getattr(c, "out_features", 0) for c in module._modules.values())


def _value(value: Any) -> Any:
    """Return what must be equal in two modules of a kind: a constant, else the object itself, such as a config."""
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    if isinstance(value, partial):  # of GELU's approximation, say: each module has its own
        return _value((value.func, value.args, *value.keywords.items()))
    return value if isinstance(value, _CONSTANTS) or inspect.isfunction(value) else id(value)


@cache
def _rotary_of(cls: Any) -> tuple[tuple[ModuleType, str], ...]:
    """Return where the methods of a class find functions that rotate q and k."""
    inherited = itertools.takewhile(lambda each: each is not nn.Module, cls.__mro__)
    methods = ChainMap(*(dict(vars(each)) for each in inherited))  # the nearest class first
    functions: list[Callable[..., Any]] = [f for f in methods.values() if inspect.isfunction(f)]
    return tuple(
        (sys.modules[function.__module__], name)
        for function in filter(inspect.isfunction, map(inspect.unwrap, functions))
        for name in inspect.getclosurevars(function).globals
        if name.startswith(ROTARY)
    )
