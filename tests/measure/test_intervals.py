"""Medians with intervals, and the clocks whose values they are made of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.timing import CudaClock, WallClock


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


def test_wall_clock_measures_what_passes() -> None:
    clock = WallClock()
    start = clock.mark()
    clock.synchronise()
    assert 0 <= clock.seconds(start, clock.mark()) < 10


def test_cuda_clock_reads_events_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            self.stream = stream

        def elapsed_time(self, other: Any) -> float:
            return 2500.0

    synchronised: list[Any] = []
    fake = SimpleNamespace(Event=Event, current_stream=lambda device: "stream", synchronize=synchronised.append)
    clock = CudaClock("cuda")
    monkeypatch.setattr(clock, "_torch", SimpleNamespace(cuda=fake))
    start, end = clock.mark(), clock.mark()
    clock.synchronise()
    assert (start.stream, synchronised, clock.seconds(start, end)) == ("stream", ["cuda"], 2.5)
