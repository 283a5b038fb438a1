"""A filtered data set, whose Arrow columns come in one piece per row, is read as one whose rows lie together."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_material import make_dataset

from fastpack_trl.errors import DataError
from fastpack_trl.packing import dataset as facts


def test_figures_of_a_filtered_data_set_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ROWS_AT_A_TIME", 16)
    rows = make_dataset("tokenized").map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})
    filtered = rows.filter(lambda row: len(row["input_ids"]) % 3)
    together = type(rows).from_list(filtered.to_list())
    assert len(rows) > len(filtered) > 16
    pieces = list(facts.pieces(filtered, "input_ids"))
    assert len(pieces) == -(-len(filtered) // 16)
    assert facts.counted_tokens(filtered) == facts.counted_tokens(together) > 0
    np.testing.assert_array_equal(facts.column_lengths(filtered, "labels"), facts.column_lengths(together, "labels"))
    largest = max(max(ids) for ids in filtered["input_ids"])
    facts.check_vocabulary(filtered, largest + 1)
    with pytest.raises(DataError, match=f"has {largest} in 'input_ids'"):
        facts.check_vocabulary(filtered, largest)
