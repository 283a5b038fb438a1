"""A sample of whole runs in random settings, beside stock's: see `support/random_runs.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from random_runs import COUNT, compare, draw

SAMPLE = (59, 66, 70, 89, 94, 95, 183, 214)
"""Few numbers that have every value of every option."""


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
