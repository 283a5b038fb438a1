"""Times of the first optimizer steps, eager and captured, by the clock of the device: nothing waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from fastpack_trl.step.graph_device import GraphDevice, Mark

ENOUGH = 3
"""Steps of a kind whose median is believed: one of them may have been logged or saved."""

_LOOK_BACK = 64


class _Begin(NamedTuple):
    """The beginning of an optimizer step, and what had been recorded and replayed until then."""

    mark: Mark
    recorded: int
    replayed: int


class StepTimes:
    """Seconds from the beginning of one optimizer step to that of the next.

    Args:
        device: whose queue is marked.
    """

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._begins: deque[_Begin] = deque(maxlen=_LOOK_BACK)
        self._inside: deque[tuple[Mark, Mark]] = deque(maxlen=_LOOK_BACK)

    def begin(self, recorded: int, replayed: int) -> None:
        """Mark the beginning of a step, with how many graphs were recorded and replayed before."""
        self._begins.append(_Begin(self._device.mark(), recorded, replayed))

    def replayed(self, start: Mark, end: Mark) -> None:
        """Keep where a replay began and ended."""
        self._inside.append((start, end))

    def eager(self) -> float | None:
        """Return the median of steps without a graph; None as long as too few are known."""
        steps = pairwise(self._begins)
        return _median([(a.mark, b.mark) for a, b in steps if a.recorded == b.recorded == b.replayed == 0])

    def captured(self) -> float | None:
        """Return the median of steps that replayed and recorded nothing; None as long as too few are known."""
        steps = pairwise(self._begins)
        return _median([(a.mark, b.mark) for a, b in steps if a.recorded == b.recorded and a.replayed < b.replayed])

    def replay(self) -> float | None:
        """Return the median of a single replay, None as long as too few are known."""
        return _median(self._inside)


def _median(spans: Iterable[tuple[Mark, Mark]]) -> float | None:
    known = [seconds for start, end in spans if (seconds := start.until(end)) is not None]
    return median(known) if len(known) >= ENOUGH else None
