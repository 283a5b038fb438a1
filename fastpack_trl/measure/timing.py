"""The seconds of a call: host time, or events on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def clock_of(device: str, index: Any = None) -> Any:
    """Return the clock of `timed` for a device type: the CUDA device (`index`, or the current one), otherwise None."""
    return (index or device) if device == "cuda" else None


def timed(call: Callable[[], T], clock: Any) -> tuple[T, float]:
    """Call, and return the result and the seconds it took.

    Args:
        clock: a CUDA device, whose events on the current stream include the gaps between kernels and the host's work
            before the first one; None for the host's time.
    """
    if clock is None:
        start = time.perf_counter()
        return call(), time.perf_counter() - start
    import torch

    torch.cuda.synchronize(clock)  # the first event is reached at once
    stream = torch.cuda.current_stream(clock)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    result = call()
    end.record(stream)
    torch.cuda.synchronize(clock)  # raises errors of the device here
    return result, begin.elapsed_time(end) / 1000
