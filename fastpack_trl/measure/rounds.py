"""Any number of callables timed in turn in one process, under a budget; one that fails drops out with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import Interval, median_interval, ratio_summary
from fastpack_trl.measure.timing import Clock, WallClock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """The times and results of `take_turns`.

    Attributes:
        seconds: per side that went through, one entry per round.
        results: per side that went through, what its callable returned in each round.
        failed: per side that did not, the reason; it appears nowhere else.
        order: the sides in the order in which they ran, warm-up left out.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, list[T]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def time(self, name: str) -> Interval:
        """Return the median and interval of one side's seconds."""
        return median_interval(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> dict[str, Any]:
        """Return the seconds of `slow` / seconds of `fast`, round by round: median, interval and every value."""
        return ratio_summary(self.seconds[slow], self.seconds[fast])


def turn_order(names: Sequence[str], index: int) -> list[str]:
    """Return the order of round `index`: every second runs backwards; of three or more sides each comes first in turn.

    ``a b``: a b, b a, a b, ... ``a b c``: a b c, c b a, b c a, a c b, c a b, b a c.
    """
    shift = index // 2 % len(names) if len(names) > 2 else 0
    turn = [*names[shift:], *names[:shift]]
    return turn if index % 2 == 0 else turn[::-1]


def take_turns(
    sides: Mapping[str, Callable[[], T]],
    *,
    rounds: int,
    warmup: int = 1,
    seconds: float = float("inf"),
    least: int = 1,
    clock: Clock | None = None,
    loud: tuple[type[BaseException], ...] = (),
    begin: Callable[[], None] = lambda: None,
    dropped: Callable[[], object] = lambda: None,
) -> Rounds[T]:
    """Time each side once per round, in the order of `turn_order`.

    What else the machine does hits all sides alike, and a drift over the run cancels in the ratio of a round.

    Args:
        warmup: rounds run before, not timed.
        seconds: no further round is started after that many; the warm-up counts.
        least: timed rounds that are run in any case.
        clock: `WallClock` by default.
        loud: errors that are raised; any other of `FAILURES` makes its side drop out.
        begin: called before the first timed round, e.g. `OtherLoad.restart`: a warm-up may compile in other processes.
        dropped: called when a side has dropped out, e.g. to give memory back.

    Raises:
        ValueError: no side, or fewer than one round.
    """
    if not sides or rounds < 1 or least < 1 or warmup < 0:
        raise ValueError(f"{len(sides)} sides, rounds={rounds}, least={least}, warmup={warmup}: nothing to time")
    clock = clock or WallClock()
    end_at = time.perf_counter() + seconds
    found: Rounds[T] = Rounds({name: [] for name in sides}, {name: [] for name in sides})
    alive = list(sides)

    for index in range(-warmup, rounds):
        if not alive or (index >= least and time.perf_counter() >= end_at):
            break
        if index == 0:
            begin()
        for name in turn_order(alive, index):
            taken, failure = attempt(partial(timed, sides[name], clock), loud)
            if taken is None:
                alive.remove(name)
                found.failed[name] = failure or ""
                dropped()
            elif index >= 0:
                found.results[name].append(taken[0])
                found.seconds[name].append(taken[1])
                found.order.append(name)
    for name in found.failed:
        del found.seconds[name], found.results[name]
    return found


def timed(call: Callable[[], T], clock: Clock) -> tuple[T, float]:
    """Call, and return the result with the seconds that it took."""
    clock.synchronise()
    start = clock.mark()
    result = call()
    end = clock.mark()
    clock.synchronise()  # what the device could not do may only be told here
    return result, clock.seconds(start, end)
