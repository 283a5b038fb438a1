"""Documents of packed rows as padded rows, for models in which nothing keeps them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.documents import DocumentsCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

LENGTHS = ([3, 1, 2], [4])
ROWS: list[dict[str, Any]] = [{"input_ids": [5, 6, 7, 8, 9, 10]}, {"input_ids": [11, 12, 13, 14]}]


@pytest.mark.parametrize("empty", [False, True], ids=["", "empty documents"])
@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
def test_each_document_is_a_padded_row_whose_first_token_has_no_label(labels: bool, empty: bool) -> None:
    stock = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    given = [[0, *lengths] if empty else lengths for lengths in LENGTHS]
    rows = [{**row, "seq_lengths": lengths} for row, lengths in zip(ROWS, given, strict=True)]
    masked = {6, 14} if labels else set()
    if labels:
        for row in rows:
            row["labels"] = [IGNORE_INDEX if token in masked else token for token in row["input_ids"]]
    batch = DocumentsCollator(stock)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 0, 0], [11, 12, 13, 14]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    expected = [[6, 7], [], [10], [12, 13, 14]]
    counted = [[token for token in row if token != IGNORE_INDEX] for row in batch["labels"].tolist()]
    assert counted == [[token for token in row if token not in masked] for row in expected]
    assert (batch["labels"][:, 0] == IGNORE_INDEX).all()
    assert stock.padding_free, "the trainer's own collator stays as it was"


def test_rows_without_lengths_are_one_document_each() -> None:
    batch = DocumentsCollator(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))(ROWS)
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor([6, 4]))
