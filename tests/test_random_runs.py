"""Samples of whole runs in random settings, with TRL's: see `support/random_runs.py` and `random_pairs_runs.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import random_pairs_runs as pairs
from random_runs import COUNT, compare, draw

SAMPLE = (59, 66, 70, 89, 94, 95, 183, 214)
"""Few numbers that have every value of every option."""
PAIRS = (0, 2, 5, 12, 18)
"""Of runs of DPO, GRPO and RLOO."""


def values(numbers: Iterable[int]) -> set[tuple[str, str]]:
    """Return the values of the options that the settings of these numbers have, apart from family and seed."""
    found = set()
    for number in numbers:
        setting = draw(number)
        options = {**setting.pop("stock"), **setting.pop("fast"), **setting}
        found |= {(name, str(value)) for name, value in options.items() if name not in ("number", "family", "seed")}
    return found


def test_the_sample_has_every_value_of_every_option() -> None:
    assert values(SAMPLE) == values(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE)
def test_a_random_run_logs_and_learns_what_stock_does(number: int) -> None:
    found = compare(number)
    assert (found["differs"], found["error"]) == ("", "")


def test_the_sample_of_pairs_has_every_rotation() -> None:
    drawn = {pairs.draw(kind, number)["rotation"] for kind in ("DPO", "online") for number in PAIRS}
    assert drawn == pairs.ROTATIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("number", PAIRS)
def test_random_runs_of_pairs_log_and_learn_what_trl_does(number: int) -> None:
    assert pairs.compare(number)["differs"] == ""
