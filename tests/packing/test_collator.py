"""Properties of `PackingCollator` and `DocumentsCollator`; the oracle is TRL's own collator."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from collator_material import ROWS, assert_same_inputs, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.documents import DocumentsCollator
from fastpack_trl.packing.packed_batch import PackedBatch

TRL = functools.partial(DataCollatorForLanguageModeling, padding_free=True)


@settings(max_examples=60, deadline=None)
@given(rows=batches())
def test_without_padding_the_output_is_trls_and_the_packed_batch(rows):
    ours, theirs = PackingCollator(pad_token_id=0)(rows), TRL(pad_token_id=0)(rows)
    assert list(ours) == [*theirs, "packed_batch"]
    assert_same_inputs({name: ours[name] for name in theirs}, theirs)


@settings(max_examples=60, deadline=None)
@given(rows=batches(min_length=0), multiple=st.sampled_from([None, 1, 7, 16]))
def test_packed_batch_is_that_of_from_lengths_and_made_of_the_same_tensors(rows, multiple):
    inputs = PackingCollator(pad_token_id=3, pad_to_multiple_of=multiple)(rows)
    lengths = [n for row in rows for n in row.get("seq_lengths", [len(row["input_ids"])]) if n]
    labels = [label for row in rows for label in row.get("labels", row["input_ids"])]
    num_padding = -len(labels) % (multiple or 1)
    labels += [-100] * num_padding
    batch = inputs["packed_batch"]
    expected = PackedBatch.from_lengths(lengths, num_padding=num_padding, labels=torch.tensor(labels))
    assert_same_inputs({"packed_batch": batch}, {"packed_batch": expected})
    for name in ("position_ids", "seq_idx"):
        assert inputs[name] is getattr(batch, name)
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch.cu_seqlens
    assert inputs["max_length_q"] == inputs["max_length_k"] == batch.max_seqlen


int32 = functools.partial(np.array, dtype=np.int32)


@pytest.mark.parametrize("convert", [np.array, int32, tuple, torch.tensor, lambda values: torch.tensor(int32(values))])
def test_output_does_not_depend_on_the_format_of_the_columns(convert):
    rows = [{name: convert(column) for name, column in row.items()} for row in ROWS]
    before = copy.deepcopy(rows)
    collator, padded = PackingCollator(pad_token_id=0, pad_to_multiple_of=16), DocumentsCollator(TRL(pad_token_id=0))
    assert_same_inputs(collator(rows), collator(ROWS))
    columns = zip(padded(rows).items(), padded(ROWS).items(), strict=True)
    assert all((mine, ids.tolist()) == (name, right.tolist()) for (mine, ids), (name, right) in columns)
    assert all(list(a[name]) == list(b[name]) for a, b in zip(rows, before, strict=True) for name in a)  # only read


def test_empty_documents_rows_and_other_columns_change_nothing():
    collator = PackingCollator(pad_token_id=0)
    padded_out = [
        {"input_ids": [], "labels": [], "seq_lengths": [], "text": "x"},
        ROWS[0] | {"seq_lengths": [0, 3, 0, 2, 0], "completion_mask": [1, 1]},
        {"input_ids": np.array([], np.int64), "seq_lengths": [0, 0]},
        ROWS[1] | {"seq_lengths": None},
        {"input_ids": []},
    ]
    assert_same_inputs(collator(padded_out), collator(ROWS))


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({}, [{"input_ids": [1, 2], "labels": [1]}], "row 0 has 1 labels for 2 input_ids: give one label per token"),
        ({}, [ROWS[0], {"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}], "row 1 .* add up to 2 for 3 .*pack .* again"),
        ({}, [{"input_ids": [1, 2], "seq_lengths": [3, -1]}], r"row 0 has seq_lengths \(min -1\) .*must be >= 0"),
        ({}, [{"input_ids": [], "seq_lengths": []}, {"input_ids": []}], r"no token in its 2 row\(s\): drop empty rows"),
        ({}, [{"text": "a", "labels": [1]}], "row 0 has no 'input_ids' column, only 'text', 'labels': tokenize"),
        ({}, [{}], "'input_ids' column, only nothing"),
        ({}, [{"input_ids": [1, 96]}], r"id 96, outside .*\[0, 96\): .*resize_token_embeddings"),
        ({}, [{"input_ids": [1, -7]}], r"id -7, outside .*\[0, 96\)"),
        ({}, [{"input_ids": [1, 2], "labels": [-100, 97]}], "labels has token id 97"),
        ({}, [{"input_ids": [1, 2], "labels": [2, -1]}], "labels has token id -1"),
        ({}, [{"input_ids": [1.0, 2.0]}], "row 0 has 'input_ids' of type list .*float64.* of integers"),
        ({}, [ROWS[0], {"input_ids": [[1, 2]]}], r"row 1 .*2 dimension\(s\).* flat sequence"),
        ({}, [{"input_ids": [[1, 2], [3]]}], "integers"),
        ({}, [{"input_ids": "abc"}], "type str .*integers"),
        ({}, [{"input_ids": [1, None]}], "integers"),
        ({"padding_free": False}, ROWS, "padding_free=False .*use TRL's DataCollatorForLanguageModeling"),
        ({"pad_to_multiple_of": 0}, ROWS, "pad_to_multiple_of=0 must be >= 1"),
        ({"vocab_size": 0}, ROWS, "vocab_size=0 must be the rows of the embedding"),
        ({"pad_to_multiple_of": 8, "pad_token_id": None}, ROWS, "pad_token_id=None .*set tokenizer.pad_token"),
        ({"pad_to_multiple_of": 8, "pad_token_id": 96}, ROWS, r"pad_token_id=96 .*\[0, 96\): choose a token"),
    ],
)
def test_errors_are_one_line_with_row_value_and_fix(options, rows, message):
    with pytest.raises(ValueError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        PackingCollator(**{"pad_token_id": 0, "vocab_size": 96} | options)(rows)


def test_the_vocabulary_is_checked_only_where_it_is_given_and_ignored_labels_pass():
    rows = [{"input_ids": [0, 95], "labels": [-100, 95]}]
    assert PackingCollator(pad_token_id=0, vocab_size=96)(rows)["labels"].tolist() == [[-100, 95]]
    assert PackingCollator(pad_token_id=0)([{"input_ids": [1, 10**9]}])["input_ids"].tolist() == [[1, 10**9]]
    PackingCollator(pad_token_id=500, vocab_size=96)  # no padding: the id is never used


@settings(max_examples=60, deadline=None)
@given(batches(min_length=0))
def test_padded_documents_and_counted_tokens_are_those_of_the_packed_row(rows):
    batch, packed = DocumentsCollator(TRL(pad_token_id=0))(rows), PackingCollator(pad_token_id=0)(rows)
    mask = batch["attention_mask"].bool()
    assert mask.sum(1).tolist() == list(packed["packed_batch"].seq_lengths)
    for name in ("input_ids", "labels"):
        assert batch[name][mask].tolist() == packed[name][0].tolist()
    assert (batch["labels"][~mask] == -100).all()
