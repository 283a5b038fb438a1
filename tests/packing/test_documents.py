"""`DocumentsCollator`: the documents of a packed row, each padded as a row of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from collator_material import batches
from hypothesis import given, settings
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.documents import DocumentsCollator

ROW = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 8, 9], "seq_lengths": [3, 0, 2]}
STOCK = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
SPLIT, WHOLE = ([[5, 6, 7], [8, 9, 0]], [[1, 1, 1], [1, 1, 0]]), ([[5, 6, 7, 8, 9]], [[1] * 5])


@pytest.mark.parametrize(
    ("columns", "rows", "labels"),
    [
        (("seq_lengths",), SPLIT, [[-100, 6, 7], [-100, 9, -100]]),
        (("seq_lengths", "labels"), SPLIT, [[-100, -100, 7], [-100, 9, -100]]),
        ((), WHOLE, [[-100, 6, 7, 8, 9]]),
        (("labels",), WHOLE, [[-100, -100, 7, 8, 9]]),
    ],
    ids=str,
)
def test_worked_examples(columns: tuple[str, ...], rows: Any, labels: Any) -> None:
    batch = DocumentsCollator(STOCK)([{name: ROW[name] for name in ("input_ids", *columns)}])
    assert (batch["input_ids"].tolist(), batch["attention_mask"].tolist()) == rows
    assert batch["labels"].tolist() == labels


@settings(max_examples=60, deadline=None)
@given(batches(min_length=0))
def test_documents_and_counted_tokens_are_those_of_the_packed_row(rows: list[dict[str, Any]]) -> None:
    batch, packed = DocumentsCollator(STOCK)(rows), PackingCollator(pad_token_id=0)(rows)
    mask = batch["attention_mask"].bool()
    assert mask.sum(1).tolist() == list(packed["packed_batch"].seq_lengths)
    for name in ("input_ids", "labels"):
        assert batch[name][mask].tolist() == packed[name][0].tolist()
    assert (batch["labels"][~mask] == -100).all()


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_columns_may_be_arrays_and_tensors(convert: Any) -> None:
    batch, expected = (DocumentsCollator(STOCK)([one]) for one in ({k: convert(v) for k, v in ROW.items()}, ROW))
    assert {name: value.tolist() for name, value in batch.items()} == {k: v.tolist() for k, v in expected.items()}
