"""The case of everyday rows: documents of the lengths it names, both sides timed in turns."""

from __future__ import annotations

import pytest

from benchmarks import everyday
from fastpack_trl.errors import UserError


def test_documents_have_the_lengths_that_the_case_names() -> None:
    _, rows = everyday.documents(0)
    lengths = set(map(len, rows["input_ids"]))
    assert len(rows) == everyday.DOCUMENTS
    assert everyday.SHORTEST <= min(lengths) < max(lengths) <= everyday.LONGEST


def test_a_cell_has_both_sides_and_their_ratio() -> None:
    (row,) = everyday.measure(["1x4-lora"], pairs=2, seed=0, layers=2, hidden=16, progress=False)
    assert (row["batch_size"], row["gradient_accumulation_steps"]) == (1, 4)
    assert all(row["sides"][side]["seconds"]["median"] > 0 for side in everyday.SIDES)
    assert row["ratios"]["stock"]["median"] > 0
    with pytest.raises(UserError, match="1x4-lora"):
        next(everyday.measure(["1x4-lor"], pairs=2, seed=0))
