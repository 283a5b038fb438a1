"""Two callables timed side by side in one process, and the interval that says how far the result can be trusted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

CONFIDENCE = 0.95


class Clock(Protocol):
    """Marks points in time and tells how far apart they are."""

    def synchronise(self) -> None:
        """Wait until everything started so far has ended."""
        ...

    def mark(self) -> Any:
        """A point in time."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another. Call after `synchronise`."""
        ...


class WallClock:
    """Host time, for work that is done when its call returns."""

    def synchronise(self) -> None:
        """Nothing is pending on the CPU."""

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


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the interval around it.

    Attributes:
        median: of the values, in their unit.
        low, high: ends of the interval.
        coverage: probability with which the interval covers the true median; under 0.95 where there are too few values.
    """

    median: float
    low: float
    high: float
    coverage: float

    def to_dict(self) -> dict[str, float]:
        """Plain data for JSON."""
        return {"median": self.median, "low": self.low, "high": self.high, "coverage": self.coverage}


def median_interval(values: Sequence[float], coverage: float = CONFIDENCE) -> Interval:
    """The median with the narrowest symmetric pair of order statistics that covers it with at least `coverage`.

    It assumes independent values and nothing about their distribution: the k-th smallest lies above the true median
    with the probability of fewer than k heads in n tosses. Fewer than 6 values cannot reach 95 %: the interval is then
    the smallest and the largest value, with the coverage that they have (5 values: 93.75 %).

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no value to take the median of: time at least one pair")
    ordered, count = sorted(values), len(values)
    tail, cut = 0.5**count, 0  # probability that the true median lies below ordered[cut]
    while cut + 1 < count / 2:
        wider = tail + math.comb(count, cut + 1) * 0.5**count
        if 1 - 2 * wider < coverage:
            break
        tail, cut = wider, cut + 1
    return Interval(median(ordered), ordered[cut], ordered[count - 1 - cut], max(0.0, 1 - 2 * tail))


@dataclass(frozen=True, slots=True)
class Comparison(Generic[T]):
    """What `interleave` measured.

    Attributes:
        names: the two sides; the ratio is the first one's seconds to the second one's.
        seconds: per side, one entry per pair.
        results: per side, what its callable returned in each pair.
        order: the sides in the order in which they ran, warm-up left out.
    """

    names: tuple[str, str]
    seconds: dict[str, tuple[float, ...]]
    results: dict[str, tuple[T, ...]]
    order: tuple[str, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Seconds of the first side / seconds of the second, pair by pair: above 1 the second is faster."""
        first, second = (self.seconds[name] for name in self.names)
        return tuple(a / b for a, b in zip(first, second, strict=True))

    @property
    def ratio(self) -> Interval:
        """Median and interval of `ratios`."""
        return median_interval(self.ratios)

    def time(self, name: str) -> Interval:
        """Median and interval of one side's seconds."""
        return median_interval(self.seconds[name])


def interleave(
    sides: Mapping[str, Callable[[], T]],
    *,
    pairs: int,
    warmup: int = 1,
    clock: Clock | None = None,
    after_pair: Callable[[Mapping[str, T]], None] | None = None,
) -> Comparison[T]:
    """Time two callables in turn, the order swapped from pair to pair (A B, B A, A B, ...).

    What the machine does beside hits both sides alike, and a drift over the run cancels in the ratio of a pair.

    Args:
        sides: two names with their callables; the first is the baseline.
        pairs: timed pairs.
        warmup: pairs run before, not timed.
        clock: `WallClock` by default.
        after_pair: called outside of the timed part with what both sides returned, warm-up included; may raise.

    Raises:
        ValueError: not two sides, fewer than one pair, or a negative warm-up.
    """
    if len(sides) != 2:
        raise ValueError(f"{len(sides)} sides ({', '.join(sides)}): give two, the baseline first")
    if pairs < 1 or warmup < 0:
        raise ValueError(f"pairs={pairs}, warmup={warmup}: time at least one pair, after 0 or more warm-up pairs")
    clock = clock or WallClock()
    first, second = sides
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, list[T]] = {name: [] for name in sides}
    order: list[str] = []
    for index in range(-warmup, pairs):
        returned: dict[str, T] = {}
        for name in (first, second) if index % 2 == 0 else (second, first):
            clock.synchronise()
            start = clock.mark()
            returned[name] = sides[name]()
            end = clock.mark()
            clock.synchronise()
            if index >= 0:
                seconds[name].append(clock.seconds(start, end))
                results[name].append(returned[name])
                order.append(name)
        if after_pair is not None:
            after_pair(returned)
    return Comparison(
        names=(first, second),
        seconds={name: tuple(values) for name, values in seconds.items()},
        results={name: tuple(values) for name, values in results.items()},
        order=tuple(order),
    )
