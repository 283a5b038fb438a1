"""Callables timed in turn in one process: what else the machine does hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastpack_trl.measure.intervals import Interval, median_interval
from fastpack_trl.measure.timing import Clock, WallClock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rounds:
    """The times of `take_turns`, and the order in which the sides ran."""

    seconds: dict[str, list[float]]
    order: list[str]

    def time(self, name: str) -> Interval:
        """Return the median and interval of one side's seconds."""
        return median_interval(self.seconds[name])


def turn_order(names: Sequence[str], index: int) -> list[str]:
    """Return the order of round `index`: every second runs backwards; of three or more sides each comes first in turn.

    ``a b``: a b, b a, a b, ... ``a b c``: a b c, c b a, b c a, a c b, c a b, b a c.
    """
    shift = index // 2 % len(names) if len(names) > 2 else 0
    turn = [*names[shift:], *names[:shift]]
    return turn if index % 2 == 0 else turn[::-1]


def take_turns(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, clock: Clock | None = None
) -> Rounds:
    """Time each side once per round, after `warmup` rounds that are not timed, in the order of `turn_order`."""
    if not sides or rounds < 1 or warmup < 0:
        raise ValueError(f"{len(sides)} sides, rounds={rounds}, warmup={warmup}: give a side and rounds >= 1")
    clock = clock or WallClock()
    result = Rounds({name: [] for name in sides}, [])
    for index in range(-warmup, rounds):
        for name in turn_order(list(sides), index):
            _, seconds = timed(sides[name], clock)
            if index >= 0:
                result.seconds[name].append(seconds)
                result.order.append(name)
    return result


def timed(call: Callable[[], T], clock: Clock) -> tuple[T, float]:
    """Call, and return the result with the seconds that it took."""
    clock.synchronise()
    start = clock.mark()
    result = call()
    end = clock.mark()
    clock.synchronise()  # what the device could not do may only be told here
    return result, clock.seconds(start, end)
