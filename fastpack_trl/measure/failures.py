"""Failures of kernels, compilers and devices, as one line: what cannot run is left out of a measurement by name."""

from __future__ import annotations

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError)
"""Errors of a kernel, a compiler or an operator that does not support its input, or that an older torch lacks. Includes
out-of-memory errors, excludes interrupts."""

_REASON = 300  # characters: a compiler's message can be pages long


def describe_failure(error: BaseException) -> str:
    """Return one line with the kind of the error and the start of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_REASON].rstrip(": ")
