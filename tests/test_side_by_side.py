"""The comparison of two runs: what rounding decides does not count, and all else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from side_by_side import assert_same_tokens, difference

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


def test_texts_are_compared_up_to_a_tie() -> None:
    stock = torch.tensor([[[0.0, 1.0, 5.0]], [[2.0, 2.00001, 0.0]], [[1.0, 0.0, 0.0]]])  # tokens, rows, vocabulary
    flipped, wrong = stock.clone(), stock.clone()
    flipped[1, 0, 0], flipped[2], wrong[1, 0, 2] = 2.00002, 7.0, 1.0
    assert_same_tokens(SimpleNamespace(logits=tuple(flipped)), SimpleNamespace(logits=tuple(stock)))
    with pytest.raises(AssertionError):
        assert_same_tokens(SimpleNamespace(logits=tuple(wrong)), SimpleNamespace(logits=tuple(stock)))
