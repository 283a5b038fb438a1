"""Equal memory: which run of ours counts, and a run under a budget, small, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import equal_memory
from benchmarks.training_rows import SMALL


def ours(peak: float, seconds: float, levels: str = "checkpoint + keep") -> dict[str, Any]:
    features = {"activation_memory": {"path": levels}}
    return {"peak_gib": peak, "step_seconds": [seconds], "report": {"features": features}}


@pytest.mark.parametrize(
    ("run", "equal"),
    [
        (ours(10.05, 1.0), True), (ours(10.2, 1.0), False), (ours(9.6, 1.0), True), (ours(9.0, 1.0), False),
        (ours(9.0, 1.0, "keep"), True),
    ],
)  # fmt: skip
def test_a_run_counts_at_the_peak_of_the_baseline_or_where_it_needs_less(run: dict[str, Any], equal: bool) -> None:
    assert equal_memory.is_equal(10.0, run) == equal


def test_the_fastest_run_that_is_not_over_the_peak_is_taken() -> None:
    slow, fast, over = ours(9.0, 2.0), ours(10.0, 1.0), ours(11.0, 0.5)
    assert equal_memory.best_of(10.0, [slow, over, fast, {"failed": "out of memory"}]) is fast
    assert equal_memory.best_of(8.0, [slow, over, fast]) is None


def test_ours_is_given_what_the_model_leaves_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_memory, "WATCHED", {"warmup": 1, "longest_warmup": 1, "timed": 1})
    found = equal_memory.measure_side({"row": SMALL.name}, equal_memory.OURS, seed=0, peak_gib=4.0, less_gib=1.0)
    assert 2.9 < found["budget_gib"] < 3
    assert len(found["step_seconds"]) == 1
    line = found["report"]["features"]["activation_memory"]
    assert line["path"] == "keep"
    assert "of 2.9" in line["reason"] or "of 3.0" in line["reason"]
