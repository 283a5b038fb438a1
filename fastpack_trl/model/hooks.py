"""Module hooks of the user: which modules have some, and calls that they shall not see.

Whoever replaces a forward, or runs one that is not the run's, answers for the hooks on it. torch announces no
registration; but the id of `RemovableHandle` grows with each, and a hook that is there is looked for until it is gone.
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
"""Who hooks modules to work at all: outputs to record, shards to gather, weights to make. Part of the model."""


def is_users(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the user's, by the module that its function or class comes from."""
    while isinstance(hook, partial):
        hook = hook.func
    return not f"{getattr(hook, '__module__', '')}.".startswith(_NOT_USERS)


def has_hooks(module: Any) -> bool:
    """Whether a call of `module` runs more than the forward of its class: hooks, whoever's, or a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def has_global_hook() -> bool:
    """Whether the user has a hook on every module of the process. Not asked in a graph, where torch traces them."""
    return not torch.compiler.is_compiling() and any(_global_dictionaries()) and bool(global_hook())


def are_hooked(*modules: nn.Module) -> bool:
    """Whether a hook or a replaced forward runs when one of `modules` is called: who goes past them asks each time."""
    return any(map(has_hooks, modules)) or has_global_hook()


def global_hook() -> str:
    """A hook of the user on every module, e.g. ``the global forward hook count``; empty without."""
    for kind, hooks in zip(GLOBAL_KINDS.values(), _global_dictionaries(), strict=True):
        for hook in hooks.values():
            if is_users(hook):
                return f"the {kind} {_name(hook)}"
    return ""


def hook_on(module: nn.Module, name: str = "") -> str:
    """A hook of the user on `module` itself, e.g. ``the forward hook scale on layers.1.mlp``; empty without.

    Args:
        name: of the module, where it is to be said.
    """
    for attribute, kind in _KINDS.items():
        for hook in getattr(module, attribute).values():
            if is_users(hook):
                return f"the {kind} {_name(hook)} on {name or type(module).__name__}"
    return ""


def hook_inside(module: nn.Module, name: str = "") -> str:
    """A hook of the user that a call of `module` reaches: global, on it, or on a module inside; empty without."""
    found = global_hook()
    if found or not _hooked_inside(module):
        return found
    named = module.named_modules(prefix=name)
    return next((found for own, inner in named if (found := hook_on(inner, own))), "")


def _hooked_inside(module: nn.Module) -> bool:
    """Whether a hook of the user is on `module` or inside: a third of a microsecond per module, names take longer."""
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
        """What `hook_inside` says now. Costs two comparisons where no hook of any kind was registered since."""
        handles = getattr(RemovableHandle, "next_id", None)
        if self.found or handles is None or handles != self._handles:
            self._handles = handles
            self.found = hook_inside(self.module, self.name)
        return self.found


@contextlib.contextmanager
def users_hooks_off(model: nn.Module) -> Iterator[None]:
    """Forward and backward passes in here are not the run's: no module hook of the user, also no global one, sees them.

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
    """Stands for a hook that is off: what a module is given and gives stays."""


def in_backward() -> bool:
    """Whether autograd is running on this thread: a layer that is called now is computed again."""
    running = getattr(torch._C, "_current_graph_task_id", None)  # as torch.utils.checkpoint asks it
    return running is not None and running() != -1


class SameInRecompute:
    """The answer to a question that is asked in each forward of a module; computed again, it gives that of its forward.

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
