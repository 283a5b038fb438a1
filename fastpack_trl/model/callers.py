"""Methods that a callback of a stock trainer is called from: transformers hands it neither trainer nor handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any


def callers(method: Callable[..., Any] | None = None) -> Iterator[Any]:
    """Yield the `self` of each method that this is called from, innermost first. Frames are only looked at.

    Args:
        method: of which alone; None: of any.
    """
    code = None if method is None else method.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if (code is None and "self" in frame.f_locals) or frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back
