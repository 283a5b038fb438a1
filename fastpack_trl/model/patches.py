"""Reversible changes to foreign objects: an attribute set for a time, and a change that several holders share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar

_T = TypeVar("_T")
_NONE = object()


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
