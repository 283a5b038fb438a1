"""`take_turns`: the order, the warm-up, the budget, and sides that drop out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch

from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import OtherLoad
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
    assert found.results == found.seconds
    ratio = found.ratio("slow", "fast")
    assert ratio["values"] == [3.0, 2.0, 3.0]
    assert (ratio["median"], ratio["low"], ratio["high"]) == (3.0, 2.0, 3.0)
    assert found.time("slow").median == 8.0
    assert clock.synchronised == 2 * 2 * 4  # before the first and before the last mark of each call


@pytest.mark.parametrize(("sides", "rounds", "warmup"), [([], 1, 0), (["a", "b"], 0, 0), (["a", "b"], 1, -1)])
def test_a_comparison_of_nothing_is_refused(sides: list[str], rounds: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="nothing to time"):
        take_turns(dict.fromkeys(sides, float), rounds=rounds, warmup=warmup)


def test_every_side_comes_first_in_its_turn() -> None:
    clock = FakeClock()
    sides = {name: clock.always(seconds) for name, seconds in {"a": 1.0, "b": 2.0, "c": 4.0}.items()}
    found = take_turns(sides, rounds=6, clock=clock)
    assert found.seconds == {"a": [1.0] * 6, "b": [2.0] * 6, "c": [4.0] * 6}
    turns = [found.order[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}


def fails_at_once() -> None:
    raise LookupError("not here")


def test_a_side_that_fails_drops_out_with_its_reason() -> None:
    clock = FakeClock()
    calls = iter(range(10))
    dropped: list[int] = []

    def fails() -> float:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return clock.always(1.0)()

    found = take_turns(
        {"good": clock.always(2.0), "bad": fails}, rounds=4, clock=clock, dropped=lambda: dropped.append(1)
    )
    assert found.failed == {"bad": "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"}
    assert found.seconds == {"good": [2.0] * 4}
    assert dropped == [1]
    assert take_turns({"bad": fails_at_once}, rounds=4).seconds == {}


def test_no_round_is_started_after_the_budget() -> None:
    clock = FakeClock()
    found = take_turns({"a": clock.always(1.0)}, rounds=50, seconds=0.0, least=3, clock=clock)
    assert len(found.seconds["a"]) == 3


def test_the_load_of_a_warm_up_is_not_counted() -> None:
    seen: list[str] = []
    sides = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    take_turns(sides, rounds=1, warmup=2, clock=FakeClock(), begin=lambda: seen.append("begin"))
    assert seen == ["a", "b", "b", "a", "begin", "a", "b"]
    load = OtherLoad()
    load._start = (0.0, 0.0, 0.0)
    load.restart()
    assert min(load._start) > 0.0


def test_an_interrupt_is_no_failure_and_an_error_that_is_loud_is_raised() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
    assert take_turns({"bad": fails_at_once, "good": float}, rounds=1).failed == {"bad": "LookupError: not here"}
    with pytest.raises(LookupError):
        take_turns({"bad": fails_at_once, "good": float}, rounds=1, loud=(LookupError,))
