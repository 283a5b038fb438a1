"""Medians with intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastpack_trl.measure.intervals import median_interval


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (100, 39)])
def test_order_statistics_are_those_of_the_sign_test(count: int, cut: int) -> None:
    found = median_interval([float(value) for value in range(count)])
    assert (found.low, found.high) == (float(cut), float(count - 1 - cut))
    exact = 1 - 2 * sum(math.comb(count, k) for k in range(cut + 1)) / 2**count
    assert found.coverage == pytest.approx(max(0.0, exact))
    assert found.coverage >= 0.95 or count < 6
    wider = 1 - 2 * sum(math.comb(count, k) for k in range(cut + 2)) / 2**count
    assert wider < 0.95, "the narrowest that covers"


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    intervals = [median_interval(random.lognormal(size=9).tolist()) for _ in range(2000)]
    covered = np.mean([interval.low <= 1.0 <= interval.high for interval in intervals])
    # Three standard errors of 2000 draws.
    assert abs(covered - intervals[0].coverage) < 3 * math.sqrt(0.04 * 0.96 / 2000)


def test_no_value_has_no_median() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        median_interval([])
