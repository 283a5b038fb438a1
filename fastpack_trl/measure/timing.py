"""Clocks: host time, and events on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Marks points in time and tells how far apart they are.

    `synchronise` waits until everything started so far has ended; `seconds` is called after it.
    """

    def synchronise(self) -> None: ...

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class WallClock:
    """Host time, for work that is done when its call returns: nothing is pending on the CPU."""

    def synchronise(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """CUDA events on the current stream of `device`: they count what the device did between two marks, host gaps too.

    The first mark after `synchronise` is reached at once, so that host work before the first kernel is counted.
    """

    def __init__(self, device: Any = None) -> None:
        import torch

        self._torch = torch
        self.device = device

    def synchronise(self) -> None:
        self._torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000


def clock_of(device: str, index: Any = None) -> Clock:
    """Return a `CudaClock` for ``cuda``, of the current device or of `index`, and a `WallClock` for any other type."""
    return CudaClock(index) if device == "cuda" else WallClock()


def timed(call: Callable[[], T], clock: Clock) -> tuple[T, float]:
    """Call, and return the result with the seconds that it took."""
    clock.synchronise()
    start = clock.mark()
    result = call()
    end = clock.mark()
    clock.synchronise()  # what the device could not do may only be told here
    return result, clock.seconds(start, end)
