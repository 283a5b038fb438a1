"""A sample of whole runs of DPO, GRPO and RLOO in random settings, with TRL's: see `support/random_pairs_runs.py`."""

import pytest
from random_pairs_runs import ROTATIONS, compare, draw

SAMPLE = (0, 2, 5, 12, 18)


def test_the_sample_has_every_rotation() -> None:
    assert {draw(kind, number)["rotation"] for kind in ("DPO", "online") for number in SAMPLE} == ROTATIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE)
def test_random_runs_log_and_learn_what_trl_does(number: int) -> None:
    assert compare(number)["differs"] == ""
