"""`PackedBatch`: the data, what is derived from it, and wrong lengths."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(0, 5), st.data())
def test_metadata_and_loss_equal_a_loop_over_documents(documents: list[int], padding: int, data: st.DataObject) -> None:
    segments = [*documents, padding] if padding else documents
    ends = list(accumulate(segments, initial=0))
    labels = data.draw(st.lists(st.sampled_from([IGNORE_INDEX, 3, 7]), min_size=ends[-1], max_size=ends[-1]))
    batch = PackedBatch.from_lengths(documents, num_padding=padding, labels=torch.tensor(labels))
    positions = [position % max(documents) for length in segments for position in range(length)]
    assert batch.position_ids.tolist() == [positions], "padding has no position beyond those of documents"
    assert batch.seq_idx.tolist() == [[index for index, length in enumerate(segments) for _ in range(length)]]
    assert batch.cu_seqlens.tolist() == ends
    dtypes = [tensor.dtype for tensor in (batch.cu_seqlens, batch.seq_idx, batch.position_ids)]
    assert dtypes == [torch.int32, torch.int32, torch.int64]
    assert (batch.max_seqlen, batch.total_tokens) == (max(segments), ends[-1])
    assert batch.seq_lengths == tuple(documents), "padding is never a document"
    inside = [t for start, length in zip(ends, documents, strict=False) for t in range(start, start + length - 1)]
    counted = [t for t in inside if labels[t + 1] != IGNORE_INDEX]
    assert batch.loss_positions.tolist() == counted
    assert batch.loss_labels.tolist() == [labels[t + 1] for t in counted]


def test_derived_objects_are_built_once_until_cleared_and_do_not_move() -> None:
    batch = PackedBatch.from_lengths((3, 2), num_padding=1, labels=torch.arange(6))
    first = batch.derive("mask", lambda: torch.zeros(2))
    assert batch.derive("mask", lambda: torch.zeros(2)) is first
    moved = batch.to("meta")
    assert moved.device.type == moved.loss_positions.device.type == "meta"
    assert moved.seq_lengths == (3, 2)
    batch.clear_derived()
    assert not batch.derived.values


def test_bucketed_max_seqlen_covers_the_longest_segment_with_few_values() -> None:
    buckets = {n: PackedBatch.from_lengths((n,)).bucketed_max_seqlen for n in range(97, 8193, 97)}
    assert all(length <= bucket <= max(128, 1.25 * length + 128) for length, bucket in buckets.items())
    assert len(set(buckets.values())) <= 24


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_lengths": ()}, "at least one document"),
        ({"seq_lengths": (3, 0)}, "length 0"),
        ({"num_padding": -2}, "num_padding=-2"),
        ({"labels": torch.zeros(2, dtype=torch.long)}, "labels has 2 tokens, the row has 3"),
    ],
)
def test_wrong_lengths_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.from_lengths(**{"seq_lengths": (3,)} | wrong)
