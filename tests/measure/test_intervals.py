"""Quartiles."""

from __future__ import annotations

from fastpack_trl.measure.intervals import quartiles


def test_quartiles_are_between_the_values_and_one_value_is_all_three() -> None:
    assert quartiles([3, 1, 2]) == {"median": 2, "q1": 1.5, "q3": 2.5, "values": [3, 1, 2]}
    assert quartiles([4.0])["q1"] == quartiles([4.0])["q3"] == 4.0
