"""`take_turns`: the order, and the warm-up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from fastpack_trl.measure.rounds import take_turns


class FakeClock:
    """Time passes only when a fake callable says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.synchronised = 0

    def synchronise(self) -> None:
        self.synchronised += 1

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def taking(self, durations: Iterable[float]) -> Callable[[], float]:
        left = iter(durations)

        def call() -> float:
            duration = next(left)
            self.now += duration
            return duration

        return call

    def always(self, duration: float) -> Callable[[], float]:
        return self.taking(itertools.repeat(duration))


def test_sides_alternate_and_the_warm_up_is_dropped() -> None:
    clock = FakeClock()
    sides = {"slow": clock.taking([100.0, 6.0, 8.0, 9.0]), "fast": clock.taking([100.0, 2.0, 4.0, 3.0])}
    found = take_turns(sides, rounds=3, warmup=1, clock=clock)
    assert found.order == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert found.seconds == {"slow": [6.0, 8.0, 9.0], "fast": [2.0, 4.0, 3.0]}
    assert found.time("slow").median == 8.0
    assert clock.synchronised == 2 * 2 * 4  # before the first and before the last mark of each call


@pytest.mark.parametrize(("sides", "rounds", "warmup"), [([], 1, 0), (["a", "b"], 0, 0), (["a", "b"], 1, -1)])
def test_a_comparison_of_nothing_is_refused(sides: list[str], rounds: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="give a side and rounds >= 1"):
        take_turns(dict.fromkeys(sides, float), rounds=rounds, warmup=warmup)


def test_every_side_comes_first_in_its_turn() -> None:
    clock = FakeClock()
    sides = {name: clock.always(seconds) for name, seconds in {"a": 1.0, "b": 2.0, "c": 4.0}.items()}
    found = take_turns(sides, rounds=6, clock=clock)
    assert found.seconds == {"a": [1.0] * 6, "b": [2.0] * 6, "c": [4.0] * 6}
    turns = [found.order[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}
