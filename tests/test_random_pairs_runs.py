"""A sample of whole runs of DPO, GRPO and RLOO in random settings, with TRL's: see `support/random_pairs_runs.py`."""

from __future__ import annotations

import pytest
from random_pairs_runs import ROTATIONS, compare, draw

SAMPLE = [*(("DPO", number) for number in (0, 24, 1, 5, 25)), *(("online", number) for number in (0, 33, 27, 19, 8, 3))]


def test_the_sample_has_every_rotation_and_trainer() -> None:
    settings = [draw(*key) for key in SAMPLE]
    assert {setting["rotation"] for setting in settings} == ROTATIONS.keys()
    assert {setting["name"] for setting in settings} == {"DPO", "GRPO", "RLOO"}
    assert {setting["stock"]["learning_rate"] == 0 for setting in settings} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_random_run_logs_and_learns_what_trl_does(key: tuple[str, int]) -> None:
    found = compare(key)
    assert (found["differs"], found["error"]) == ("", "")
