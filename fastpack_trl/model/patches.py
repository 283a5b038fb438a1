"""One change to a foreign object for everyone who asks for it: made by the first, taken back with the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Share:
    """Hung on the object; a copy or a pickle of it is nobody's."""

    def __init__(self) -> None:
        self.holders = 0
        self.stack = contextlib.ExitStack()
        self.value: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Share, ()


@contextlib.contextmanager
def shared(owner: object, name: str, install: Callable[[], AbstractContextManager[_T]]) -> Iterator[_T]:
    """`install`, entered by the first who asks for it and left with the last, in whatever order they leave.

    A trainer that is made in a callback of another finds the model as it is in the middle of that one's training.

    Args:
        owner: what is changed.
        name: of the attribute that says so, while somebody holds it.
        install: makes the change, once.
    """
    share: _Share | None = vars(owner).get(name)
    if share is None or not share.holders:
        share = _Share()
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
