"""Module hooks of the user: where there are some, and how to run a model without them.

Code that replaces a forward, or runs one of its own, must keep the hooks of the user right. torch announces no
registration, but the id of `RemovableHandle` grows with each: only then modules are searched, and while one is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""The dictionaries of a module."""
GLOBAL_KINDS = {f"_global{name}": f"global {kind}" for name, kind in _KINDS.items()}
"""Those of every module, in `torch.nn.modules.module`."""

_NOT_USERS = tuple(
    f"{package}."
    for package in (
        "accelerate", "bitsandbytes", "deepspeed", "fastpack_trl", "peft", "transformers", "trl",
        "torch.distributed", "torch.nn.parallel", "torch.nn.utils", "torch.utils",
    )
)  # fmt: skip
"""Packages whose hooks are part of the model: they record outputs, gather shards, make weights."""


def is_users(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is the user's, by the module that defines its function or class."""
    while isinstance(hook, partial):
        hook = hook.func
    return not f"{getattr(hook, '__module__', '')}.".startswith(_NOT_USERS)


def has_hooks(module: Any) -> bool:
    """Return whether a call of `module` runs more than the forward of its class: any hook, or a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def has_global_hook() -> bool:
    """Return whether the user has a hook on every module of the process; False in a graph, where torch traces them."""
    return not torch.compiler.is_compiling() and any(_global_dictionaries()) and bool(global_hook())


def are_hooked(*modules: nn.Module) -> bool:
    """Return whether a call of one of `modules` runs a hook or a replaced forward: asked before each call past them."""
    return any(map(has_hooks, modules)) or has_global_hook()


def global_hook() -> str:
    """Return a hook of the user on every module, e.g. ``the global forward hook count``; empty without."""
    for kind, hooks in zip(GLOBAL_KINDS.values(), _global_dictionaries(), strict=True):
        for hook in hooks.values():
            if is_users(hook):
                return f"the {kind} {_name(hook)}"
    return ""


def hook_on(module: nn.Module, name: str = "") -> str:
    """Return a hook of the user on `module` itself, e.g. ``the forward hook scale on layers.1.mlp``; empty without.

    Args:
        name: of the module, where it is to be said.
    """
    for attribute, kind in _KINDS.items():
        for hook in getattr(module, attribute).values():
            if is_users(hook):
                return f"the {kind} {_name(hook)} on {name or type(module).__name__}"
    return ""


def hook_inside(module: nn.Module, name: str = "") -> str:
    """Return a hook of the user that a call of `module` reaches: global, on it, or further inside; empty without."""
    found = global_hook()
    if found or not _hooked_inside(module):
        return found
    named = module.named_modules(prefix=name)
    return next((found for own, inner in named if (found := hook_on(inner, own))), "")


def _hooked_inside(module: nn.Module) -> bool:
    """Return whether a hook of the user is on `module` or inside: 0.3 us per module; names would take longer."""
    modules: list[Any] = [module]
    for inner in modules:  # grows
        if inner is None:
            continue
        own = inner.__dict__
        hooked = (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        )
        if hooked and any(is_users(hook) for kind in _KINDS for hook in own[kind].values()):
            return True
        if own["_modules"]:
            modules += own["_modules"].values()
    return False


class HookWatch:
    """The hooks of the user that a call of one module reaches, looked for only where one may have come or gone.

    Args:
        module: whose calls are meant.
        name: of the module in its model.
    """

    def __init__(self, module: nn.Module, name: str = "") -> None:
        self.module, self.name = module, name
        self.found = ""
        """As `hook_inside` said last."""
        self._handles: int | None = None

    def look(self) -> str:
        """Return what `hook_inside` says now. Costs two comparisons where no hook of any kind was registered since."""
        handles = getattr(RemovableHandle, "next_id", None)
        if self.found or handles is None or handles != self._handles:
            self._handles = handles
            self.found = hook_inside(self.module, self.name)
        return self.found


@contextlib.contextmanager
def users_hooks_off(model: nn.Module) -> Iterator[None]:
    """Hide forward and backward passes in this context from every module hook of the user, also from global ones.

    Afterwards the hooks are there again, in their order, but for those that were removed meanwhile. Global hooks are
    off for the whole process while the context is open.
    """
    taken: list[tuple[dict[int, Any], int, Any]] = []
    dictionaries = [getattr(module, attribute) for module in model.modules() for attribute in _KINDS]
    for hooks in (*dictionaries, *_global_dictionaries()):
        taken += [(hooks, key, hook) for key, hook in hooks.items() if is_users(hook)]
    for hooks, key, _ in taken:
        hooks[key] = _silent  # in its place: its handle still removes it
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            if key in hooks:
                hooks[key] = hook


def _silent(*_args: Any, **_keywords: Any) -> None:
    """Stand in for a hook that is off: inputs and outputs of the module stay."""


def in_backward() -> bool:
    """Return whether autograd is running on this thread: a layer that is called now is recomputed."""
    running = getattr(torch._C, "_current_graph_task_id", None)  # as torch.utils.checkpoint asks it
    return running is not None and running() != -1


class SameInRecompute:
    """An answer that is asked for in each forward of a module: a recompute gets the one of its forward.

    A checkpoint compares what forward and recompute save: a hook that came or went between must not change the way.
    """

    def __init__(self) -> None:
        self._last = False

    def __call__(self, answer: bool) -> bool:
        if answer != self._last and not torch.compiler.is_compiling():
            if in_backward():
                return self._last
            self._last = answer
        return answer


@cache
def _global_dictionaries() -> tuple[dict[int, Any], ...]:
    # A torch without one of them is named by what `model.upstream` asks for "batches".
    return tuple(getattr(nn.modules.module, name, {}) for name in GLOBAL_KINDS)


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).rpartition("<locals>.")[2]
