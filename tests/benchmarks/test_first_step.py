"""The case of the first step, small, on the CPU: figures of both sides, and which cache each run has."""

from __future__ import annotations

import pytest

from benchmarks.captured import ROWS, SMALL
from benchmarks.first_step import LONG, STEPS, Length, measure_run, runs


def test_warm_runs_come_after_the_cold_one_that_fills_their_cache() -> None:
    order = list(runs(STEPS))
    assert order[0] == ("stock", "cold", Length((20, 100, 500)))
    assert [(cache, length) for side, cache, length in order if side == "fastpack"] == [
        (cache, length)
        for cache in ("cold", "warm")
        for length in (Length((LONG,), long=True), Length((500,)), Length((100,)), Length((20,)))
    ]


@pytest.mark.parametrize("row", [SMALL.name, "small lora 2x4"])
def test_a_run_of_two_steps_has_its_seconds_and_those_of_the_report(row: str) -> None:
    found = measure_run(ROWS[row], "fastpack", Length((2,)), "cpu", seed=0)
    assert 0 < found["seconds"][1] < found["seconds"][2] <= found["train_seconds"]
    assert found["step_seconds"] == pytest.approx(found["seconds"][2] - found["seconds"][1])
    assert 0 < found["start_up"]["proof"] < found["seconds"][1]
    assert float(found["report"]["facts"]["first step"].split()[0]) == pytest.approx(found["seconds"][1], abs=0.1)
