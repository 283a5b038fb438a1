"""Changes to foreign objects that are taken back: an attribute set for a time, and a change that several ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

_T = TypeVar("_T")
_NONE = object()


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, a class or a module of Python while the context is open.

    Afterwards `owner` itself has what it had, or nothing of that name. Where somebody else has set it meanwhile, theirs
    stays. The ``__setattr__`` of an object is not asked: that of a compiled model would write to the model inside. Not
    for a property that keeps its value elsewhere: what it was is not known here.
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


@contextlib.contextmanager
def attributes_kept(owners: Iterable[Any], name: str) -> Iterator[None]:
    """Give each of `owners`, which have an attribute of that name, its value back, whoever has changed it meanwhile."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class SharedPatch(Patch):
    """A change that `shared` has made to the object on which this hangs.

    Attributes:
        holders: how many have asked for the change and not given it back.
        value: what the change yielded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holders = 0
        self.stack = contextlib.ExitStack()


@contextlib.contextmanager
def shared(owner: Any, name: str, install: Callable[[], AbstractContextManager[_T]]) -> Iterator[_T]:
    """Enter `install` for the first who asks for it and leave it with the last, in whatever order they leave.

    A trainer that is made in a callback of another finds the model as it is in the middle of that one's training.

    Args:
        owner: the object, or the class, that is changed.
        name: of the attribute that holds a `SharedPatch` while somebody holds the change.
        install: makes the change, once.
    """
    share = vars(owner).get(name)
    if share is None:
        share = SharedPatch()
        share.value = share.stack.enter_context(install())
        setattr(owner, name, share)
    share.holders += 1
    try:
        yield share.value
    finally:
        share.holders -= 1
        if not share.holders:
            delattr(owner, name)
            share.stack.close()
