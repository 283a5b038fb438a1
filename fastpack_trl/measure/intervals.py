"""The median of some values, and the interval that says how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_CONFIDENCE = 0.95


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


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median with the narrowest symmetric pair of order statistics that covers it by 95 % or more.

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
        if 1 - 2 * wider < _CONFIDENCE:
            break
        tail, cut = wider, cut + 1
    return Interval(median(ordered), ordered[cut], ordered[count - 1 - cut], max(0.0, 1 - 2 * tail))
