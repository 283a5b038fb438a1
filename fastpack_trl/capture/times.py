"""Whether captured steps pay: optimizer steps eager and captured in turn, by the clock of the device."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fastpack_trl.capture.device import CudaGraphs, CudaMark
from fastpack_trl.measure.intervals import Interval, median_interval

ENOUGH = 3
"""Eager steps whose median is believed before anything is recorded: one of them may have been logged or saved."""
LEAST_PAIRS, MOST_PAIRS = 4, 10
"""Pairs of an eager and a captured step: decided between them, as soon as their interval allows it."""
LEAST_BLOCK, MOST_EAGER = 2, 6
"""Steps of one kind in a row: of each block the last counts."""
MOST_STEPS = 160
"""Steps after which comparing ends without graphs."""
LEAST_GAIN, SMALL_GAIN, SMALL_SHARE = 0.05, 0.02, 0.03
"""Share of a step that graphs have to save; the second one where they hold 3 % of the free memory at most."""


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

    They do where the whole interval of the gain lies above `least`, and do not where three quarters of the pairs lie
    below. After `MOST_PAIRS` the median has to lie above it, and three quarters of the pairs above zero: a gain within
    the noise is none.

    Args:
        pairs: seconds of an eager step and of the captured one beside it.
        least: share of a step that has to be saved.
    """
    if len(pairs) < LEAST_PAIRS:
        return None
    gains = sorted(1 - captured / eager for eager, captured in pairs)
    gain, quarter = median_interval(gains), len(gains) // 4
    if len(pairs) < MOST_PAIRS and gain.low < least <= gains[-1 - quarter]:
        return None
    eager, captured = (median(column) for column in zip(*pairs, strict=True))
    pays = gain.median >= least and gains[quarter] > 0
    return Verdict(pays, gain, eager, captured, len(pairs))


class _Step(NamedTuple):
    start: CudaMark
    end: CudaMark
    kind: str
    tokens: int

    def seconds(self) -> float | None:
        return self.start.until(self.end)


class StepTurns:
    """Whose turn an optimizer step is, and the seconds from its beginning to that of the next.

    All steps are eager until `compare` is called; then blocks of eager and captured steps take turns. In a captured one
    the host gets far ahead, and the device is still at work when the host launches the next eager step, which would
    seem to take no longer than its kernels. So eager steps go on until the device had nothing left to do when one
    began, and that counts; or `MOST_EAGER`, where it is the device that sets the pace.

    Args:
        device: whose queue is marked; nothing waits for it, unless `apart`.
        apart: steps end with what other processes have to come to, whose turns are others. While steps are compared,
            each begins on an idle device, and its time ends with its last micro-batch: it is that of this process.

    Attributes:
        compares: steps are eager and captured in turn.
    """

    def __init__(self, device: CudaGraphs, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self.compares = False
        self._forget()

    def _forget(self) -> None:
        self._start: CudaMark | None = None
        self._end: CudaMark | None = None
        self._before, self._tokens = (0, 0), 0
        self._was_idle = False
        self._eager, self._block, self._all = True, 0, 0
        self._counted: list[_Step] = []

    def compare(self) -> None:
        """Begin with turns at the next step."""
        self.compares = True
        self._forget()

    @property
    def is_eager(self) -> bool:
        """Return whether the present step is to run eager, though there are graphs."""
        return self.compares and self._eager

    def worked(self, tokens: int) -> None:
        """Mark the end of a micro-batch of so many tokens; what follows it in a step is short."""
        self._end = self._device.mark()
        self._tokens += tokens

    def interrupt(self) -> None:
        """Leave the present step out: something else is done before the next."""
        self._start = None

    def begin(self, replayed: int, prepared: int) -> None:
        """Mark the beginning of an optimizer step.

        Args:
            replayed: replays of the run so far.
            prepared: rows so far that ran in static shapes to be recorded, or fit no bucket, and recordings.
        """
        if self._apart and self.compares:
            self._device.wait()
        idle = self._end is not None and self._end.until(self._end) is not None
        now = self.end(replayed, prepared)
        self._start, self._before, self._was_idle = now, (replayed, prepared), idle

    def end(self, replayed: int, prepared: int) -> CudaMark:
        """End the present step now, where what follows is of another kind (a generation); return the mark."""
        now = self._device.mark()
        end = self._end if self._apart and self.compares and self._end is not None else now
        if self._start is not None:
            replays, others = replayed - self._before[0], prepared - self._before[1]
            kind = "" if others else "captured" if replays else "eager"
            self._ended(_Step(self._start, end, kind, self._tokens))
        self._start, self._tokens = None, 0
        return now

    def _ended(self, step: _Step) -> None:
        self._block, self._all = self._block + 1, self._all + 1
        if not self.compares:
            if step.kind == "eager":
                self._counted.append(step)
            return
        if step.kind != ("eager" if self._eager else "captured") or self._block < LEAST_BLOCK:
            return
        if not self._eager or self._was_idle or self._block >= MOST_EAGER:
            self._counted.append(step)
            self._eager, self._block = not self._eager, 0

    def eager(self) -> float | None:
        """Return the median of steps before any graph; None as long as too few are known."""
        known = [seconds for step in self._counted if (seconds := step.seconds()) is not None]
        return median(known) if len(known) >= ENOUGH else None

    def pairs(self) -> list[tuple[float, float]]:
        """Return the seconds of the pairs (eager, captured) that the device has finished."""
        return _paired([step.seconds() for step in self._counted])

    def verdict(self, least: float) -> Verdict | None:
        """Return `judge` of the pairs so far; None where more are needed.

        Rows differ: by the step or by the token, whichever says it with less spread. Where the host sets the pace, a
        step takes as long for any row; where the device does, as long as its tokens. Where hardly a row fits into a
        recorded size, pairs stay away, and there is little to keep: no, after `MOST_STEPS`.
        """
        pairs = self.pairs()
        times = [(step.seconds(), max(1, step.tokens)) for step in self._counted]
        each = _paired([None if seconds is None else seconds / tokens for seconds, tokens in times])
        found = judge(min(pairs, each, key=_spread), least) if pairs else None
        if found is None and self._all >= MOST_STEPS:
            return Verdict(False, Interval(0.0, 0.0, 0.0, 0.0), 0.0, 0.0, len(pairs))
        if found is None:
            return None
        eager, captured = (median(column) for column in zip(*pairs, strict=True))
        return found._replace(eager=eager, captured=captured)


def _spread(pairs: Sequence[tuple[float, float]]) -> float:
    gain = median_interval([1 - captured / eager for eager, captured in pairs])
    return gain.high - gain.low


def _paired(values: Sequence[float | None]) -> list[tuple[float, float]]:
    pairs = zip(values[::2], values[1::2], strict=False)
    return [(eager, captured) for eager, captured in pairs if eager is not None and captured is not None]
