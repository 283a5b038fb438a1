"""The comparison of two runs: what rounding decides does not count, and all else does."""

from __future__ import annotations

from typing import Any

import pytest
from side_by_side import difference

ROW: dict[str, Any] = {"loss": 0.7, "rewards/margins": 0.3, "rewards/accuracies": 0.5, "mean_token_accuracy": 0.02}


@pytest.mark.parametrize(
    ("both", "ours", "same"),
    [
        ({}, {"loss": 0.7001}, False), ({}, {"loss": float("nan")}, False), ({"loss": float("nan")}, {}, True),
        ({}, {"loss": None}, False), ({}, {"more": 1.0}, False), ({}, {"rewards/accuracies": 0.75}, False),
        ({"rewards/margins": 1e-8}, {"rewards/accuracies": 0.75}, True), ({"accuracy": 1.0}, {"accuracy": 0.5}, False),
        ({}, {"mean_token_accuracy": 0.03}, True), ({}, {"mean_token_accuracy": 0.1}, False),
    ],
)  # fmt: skip
def test_a_log_differs_by_all_but_ties(both: dict[str, Any], ours: dict[str, Any], same: bool) -> None:
    assert (difference([ROW | both | ours, ROW], [ROW | both, ROW], 1e-5, 2e-6) == "") == same


def test_one_row_has_a_tie_of_tokens_and_a_wrong_metric_is_in_all() -> None:
    wrong = ROW | {"mean_token_accuracy": 0.0}
    for rows, rtol, same in ((1, 1e-5, True), (2, 1e-5, False), (2, 2**-7, True), (1, 0.0, False)):
        assert (difference([wrong] * rows, [ROW] * rows, rtol, 0.0) == "") == same
