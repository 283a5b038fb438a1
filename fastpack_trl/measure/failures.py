"""A call that may fail, and its failure as one line: a side that cannot run is left out of a measurement by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError)
"""Errors of a kernel, a compiler or an operator that does not support its input, or that an older torch lacks. Includes
out-of-memory errors, excludes interrupts."""

_REASON = 300  # characters: a compiler's message can be pages long


def attempt(call: Callable[[], T], loud: tuple[type[BaseException], ...] = ()) -> tuple[T | None, str | None]:
    """Return ``(result, None)``, or ``(None, reason)`` if `call` raised one of `FAILURES`, those of `loud` excepted."""
    try:
        return call(), None
    except FAILURES as error:
        if isinstance(error, loud):
            raise
        reason = describe_failure(error)
    # Not in the handler, where the traceback still holds the tensors of the call.
    gc.collect()
    return None, reason


def describe_failure(error: BaseException) -> str:
    """Return one line with the kind of the error and the start of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_REASON].rstrip(": ")
