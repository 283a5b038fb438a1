"""Properties of `PackingCollator`; the oracle is TRL's own collator."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from collator_material import ROWS, assert_same_batch, assert_same_inputs, batches
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import PackedBatch

# --- what comes out ---


@settings(max_examples=150, deadline=None)
@given(rows=batches())
def test_without_padding_the_output_is_trls_and_the_packed_batch(rows):
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    ours = PackingCollator(pad_token_id=0)(rows)
    assert list(ours) == [*theirs, "packed_batch"]
    assert_same_inputs({name: ours[name] for name in theirs}, theirs)


@settings(max_examples=150, deadline=None)
@given(rows=batches(min_length=0), multiple=st.sampled_from([None, 1, 7, 16]))
def test_packed_batch_is_that_of_from_lengths_and_made_of_the_same_tensors(rows, multiple):
    inputs = PackingCollator(pad_token_id=3, pad_to_multiple_of=multiple)(rows)
    lengths = [n for row in rows for n in row.get("seq_lengths", [len(row["input_ids"])]) if n]
    labels = [label for row in rows for label in row.get("labels", row["input_ids"])]
    num_padding = -len(labels) % (multiple or 1)
    labels += [-100] * num_padding
    batch = inputs["packed_batch"]
    reference = PackedBatch.from_lengths(lengths, num_padding=num_padding, labels=torch.tensor(labels))
    assert_same_batch(batch, reference)
    assert inputs["position_ids"] is batch.position_ids
    assert inputs["seq_idx"] is batch.seq_idx
    assert inputs["cu_seq_lens_q"] is batch.cu_seqlens
    assert inputs["cu_seq_lens_k"] is batch.cu_seqlens
    assert inputs["max_length_q"] == inputs["max_length_k"] == batch.max_seqlen


def test_padding_is_one_tail_segment_where_trl_has_a_document_per_token():
    ours = PackingCollator(pad_token_id=3, pad_to_multiple_of=8)(ROWS[:1])
    theirs = DataCollatorForLanguageModeling(pad_token_id=3, padding_free=True, pad_to_multiple_of=8)(ROWS[:1])
    assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert torch.equal(ours["labels"], theirs["labels"])
    assert ours["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert theirs["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 7, 8]
    assert ours["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert ours["packed_batch"].num_padding == 3
    assert ours["packed_batch"].seq_lengths == (3, 2)


@pytest.mark.parametrize(
    "convert",
    [np.array, lambda v: np.array(v, np.int32), tuple, torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32)],
    ids=["numpy_int64", "numpy_int32", "tuple", "torch_int64", "torch_int32"],
)
def test_output_does_not_depend_on_the_format_of_the_columns(convert):
    rows = [{name: convert(column) for name, column in row.items()} for row in ROWS]
    before = copy.deepcopy(rows)
    collator = PackingCollator(pad_token_id=0, pad_to_multiple_of=16)
    assert_same_inputs(collator(rows), collator(ROWS))
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


def test_numpy_format_of_datasets_equals_trls_collator_on_python_format():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 95, n).tolist() for n in rng.integers(1, 40, 60)]
    packed = pack_dataset(Dataset.from_dict({"input_ids": documents, "labels": documents}), 64, "bfd")
    theirs, ours = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), PackingCollator(pad_token_id=0)
    for indices in ([0], [1, 2, 3], list(range(len(packed)))):
        reference = theirs(packed.__getitems__(indices))
        inputs = ours(packed.with_format("numpy").__getitems__(indices))
        assert_same_inputs({name: inputs[name] for name in reference}, reference)


# --- errors ---


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"input_ids": [1, 2], "labels": [1]}], ["row 0", "1 labels", "2 input_ids"]),
        ([ROWS[0], {"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}], ["row 1", "add up to 2", "3 input_ids"]),
        ([{"input_ids": [1, 2], "seq_lengths": [3, -1]}], ["-1", "0 or more"]),
        ([{"input_ids": [], "seq_lengths": []}, {"input_ids": []}], ["2 row(s)", "drop empty rows"]),
        ([], ["0 row(s)"]),
        ([{"text": "a", "labels": [1]}], ["'input_ids'", "'text', 'labels'", "tokenize"]),
        ([{}], ["'input_ids'", "nothing"]),
        ([{"input_ids": [1, 96]}], ["96", "[0, 96)", "resize_token_embeddings"]),
        ([{"input_ids": np.array([1, -7])}], ["-7", "[0, 96)"]),
        ([{"input_ids": [1, 2], "labels": [-100, 97]}], ["labels", "97"]),
        ([{"input_ids": [1, 2], "labels": [2, -1]}], ["labels", "-1"]),
        ([{"input_ids": [1.0, 2.0]}], ["float64", "integers"]),
        ([{"input_ids": [[1, 2]]}], ["2 dimension(s)"]),
        ([{"input_ids": [[1, 2], [3]]}], ["integers"]),
        ([{"input_ids": "abc"}], ["str", "integers"]),
        ([{"input_ids": [1, None]}], ["integers"]),
    ],
)
def test_a_wrong_batch_raises_one_line_with_the_value_and_the_remedy(rows, words):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        PackingCollator(pad_token_id=0, vocab_size=96)(rows)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"padding_free": False}, ["padding_free=False", "DataCollatorForLanguageModeling"]),
        ({"pad_to_multiple_of": 0}, ["pad_to_multiple_of=0"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"vocab_size": 5, "pad_to_multiple_of": 8, "pad_token_id": 5}, ["pad_token_id=5", "[0, 5)"]),
    ],
)
def test_a_wrong_setting_raises_one_line_with_the_value_and_the_remedy(settings_, words):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        PackingCollator(**{"pad_token_id": 0} | settings_)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_vocabulary_is_checked_only_where_it_is_given_and_ignored_labels_pass():
    rows = [{"input_ids": [0, 95], "labels": [-100, 95]}]
    assert PackingCollator(pad_token_id=0, vocab_size=96)(rows)["labels"].tolist() == [[-100, 95]]
    assert PackingCollator(pad_token_id=0)([{"input_ids": [1, 10**9]}])["input_ids"].tolist() == [[1, 10**9]]
    PackingCollator(pad_token_id=500, vocab_size=96)  # no padding: the id is never used
