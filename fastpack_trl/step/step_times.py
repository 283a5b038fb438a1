"""Whether captured steps pay: optimizer steps eager and captured in turn, by the clock of the device."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fastpack_trl.measure.intervals import Interval, median_interval
from fastpack_trl.step.graph_device import GraphDevice, Mark

ENOUGH = 3
"""Eager steps whose median is believed before anything is recorded: one of them may have been logged or saved."""
LEAST_PAIRS, MOST_PAIRS = 4, 12
"""Pairs of an eager and a captured step: decided between them, as soon as their interval allows it."""
LEAST_GAIN, SMALL_GAIN, SMALL_SHARE = 0.05, 0.02, 0.03
"""Share of a step that graphs have to save; the second where they hold less than the third of the memory beside."""


class Verdict(NamedTuple):
    """What was found: ``Verdict(pays=True, gain=Interval(0.62, 0.58, 0.65, 0.875), eager=0.097, captured=0.037)``."""

    pays: bool
    gain: Interval
    """Share of an eager step that a captured one saves."""
    eager: float
    """Seconds, the median of the pairs."""
    captured: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"steps of {self.eager * 1e3:.1f} ms eager, {self.captured * 1e3:.1f} ms captured in {self.pairs} pairs in "
            f"turn, gain {self.gain.median:.0%} ({self.gain.low:.0%} to {self.gain.high:.0%})"
        )


def least_gain(held: int, free: int) -> float:
    """Return the share of a step that graphs of `held` bytes have to save where `free` bytes are left beside them."""
    return LEAST_GAIN if held > SMALL_SHARE * (held + free) else SMALL_GAIN


def judge(pairs: Sequence[tuple[float, float]], least: float) -> Verdict | None:
    """Return whether captured steps pay; None as long as more pairs may tell.

    A gain counts where its whole interval lies above `least`. After `MOST_PAIRS` the median has to, and the interval
    above zero: a gain within the noise is none.

    Args:
        pairs: seconds of an eager step and of the captured one beside it.
        least: share of a step that has to be saved.
    """
    if len(pairs) < LEAST_PAIRS:
        return None
    gain = median_interval([1 - captured / eager for eager, captured in pairs])
    last = len(pairs) >= MOST_PAIRS
    if not (last or gain.low >= least or gain.high < least):
        return None
    eager, captured = (median(column) for column in zip(*pairs, strict=True))
    return Verdict(gain.low > 0 and gain.median >= least, gain, eager, captured, len(pairs))


class _Step(NamedTuple):
    start: Mark
    end: Mark
    kind: str

    def seconds(self) -> float | None:
        return self.start.until(self.end)


class StepTurns:
    """Whose turn an optimizer step is, and the seconds from its beginning to that of the next.

    All steps are eager until `compare` is called. Then each second pair has the order of the first turned round, and
    the first pair does not count: the memory that an eager step needs is allocated anew beside graphs, and a graph is
    loaded by its first replay.

    Args:
        device: whose queue is marked; nothing waits for it.

    Attributes:
        compares: steps are eager and captured in turn.
    """

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self.compares = False
        self._forget()

    def _forget(self) -> None:
        self._start: Mark | None = None
        self._before = (0, 0)
        self._steps: list[_Step] = []

    def compare(self) -> None:
        """Begin with pairs at the next step."""
        self.compares = True
        self._forget()

    @property
    def is_eager(self) -> bool:
        """Return whether the present step is to run eager, though there are graphs."""
        number = len(self._steps)
        return self.compares and (number % 2) == (number // 2 % 2)

    def begin(self, replayed: int, prepared: int) -> None:
        """Mark the beginning of an optimizer step.

        Args:
            replayed: replays of the run so far.
            prepared: rows that ran in static shapes to be recorded, and recordings, so far.
        """
        now = self._device.mark()
        if self._start is not None:
            replays, others = replayed - self._before[0], prepared - self._before[1]
            kind = "" if others else "captured" if replays else "eager"
            self._steps.append(_Step(self._start, now, kind))
        self._start, self._before = now, (replayed, prepared)

    def eager(self) -> float | None:
        """Return the median of steps without a graph; None as long as too few are known."""
        known = [seconds for step in self._steps if step.kind == "eager" and (seconds := step.seconds()) is not None]
        return median(known) if len(known) >= ENOUGH else None

    def pairs(self) -> list[tuple[float, float]]:
        """Return the seconds (eager, captured) of the pairs that the device has finished and that are of both kinds."""
        found = []
        for one, other in zip(self._steps[2::2], self._steps[3::2], strict=False):
            times = {step.kind: seconds for step in (one, other) if (seconds := step.seconds()) is not None}
            if {"eager", "captured"} == times.keys():
                found.append((times["eager"], times["captured"]))
        return found

    def verdict(self, least: float) -> Verdict | None:
        """Return `judge` of the pairs so far; None where more are needed, and after four times as many steps "no".

        Rows that fit no bucket leave steps of no kind: where nearly all are such, there is nothing to keep.
        """
        pairs = self.pairs()
        found = judge(pairs, least)
        if found is None and len(self._steps) >= 8 * MOST_PAIRS:
            eager = self.eager() or 0.0
            return Verdict(False, Interval(0.0, 0.0, 0.0, 0.0), eager, eager, len(pairs))
        return found
