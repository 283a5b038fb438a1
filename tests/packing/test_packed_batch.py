"""`PackedBatch`: the data, what hangs on it, how it travels."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(0, 5))
def test_metadata_agrees_with_a_loop_over_documents(documents: list[int], padding: int) -> None:
    batch = PackedBatch.from_lengths(documents, num_padding=padding)
    segments = [*documents, padding] if padding else documents
    positions = [position for length in segments for position in range(length)]
    assert batch.position_ids.tolist() == [positions]
    assert batch.seq_idx.tolist() == [[index for index, length in enumerate(segments) for _ in range(length)]]
    assert batch.cu_seqlens.tolist() == [sum(segments[:index]) for index in range(len(segments) + 1)]
    assert batch.cu_seqlens.dtype == batch.seq_idx.dtype == torch.int32
    assert batch.position_ids.dtype == torch.int64
    assert batch.max_seqlen == max(segments)
    assert batch.total_tokens == sum(segments)
    assert batch.seq_lengths == tuple(documents), "padding is never a document"


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(0, 4), st.data())
def test_loss_positions_are_the_pairs_inside_documents(documents: list[int], padding: int, data: st.DataObject) -> None:
    total = sum(documents) + padding
    labels = data.draw(st.lists(st.sampled_from([IGNORE_INDEX, 3, 7]), min_size=total, max_size=total))
    batch = PackedBatch.from_lengths(documents, num_padding=padding, labels=torch.tensor(labels))
    expected = []
    start = 0
    for length in documents:
        expected += [t for t in range(start, start + length - 1) if labels[t + 1] != IGNORE_INDEX]
        start += length
    assert batch.loss_positions is not None
    assert batch.loss_labels is not None
    assert batch.loss_positions.tolist() == expected
    assert batch.loss_labels.tolist() == [labels[t + 1] for t in expected]


def test_derived_objects_are_built_once_and_die_when_cleared() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    first = batch.derive("mask", lambda: torch.zeros(2))
    assert batch.derive("mask", lambda: torch.zeros(2)) is first
    reference = weakref.ref(first)
    batch.clear_derived()
    del first
    gc.collect()
    assert reference() is None
    assert list(batch.build_counts.values()) == [1]


def test_bucketed_max_seqlen_covers_the_longest_segment_with_few_values() -> None:
    seen = set()
    for length in range(1, 8193):
        bucket = PackedBatch.from_lengths((length,)).bucketed_max_seqlen if length % 97 == 0 else None
        if bucket is not None:
            seen.add(bucket)
            assert length <= bucket <= max(128, 1.25 * length + 128)
    assert len(seen) <= 24


def test_moving_leaves_derived_objects_behind() -> None:
    batch = PackedBatch.from_lengths((3, 2), num_padding=1, labels=torch.arange(6))
    batch.derive("mask", lambda: torch.zeros(2))
    moved = batch.to("meta")
    assert moved.device.type == "meta"
    assert moved.seq_lengths == (3, 2)
    assert moved.loss_positions is not None
    assert moved.loss_positions.device.type == "meta"
    assert not moved.build_counts


def test_survives_pickling() -> None:
    batch = PackedBatch.from_lengths((3, 2), num_padding=1, labels=torch.arange(6))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.seq_lengths == batch.seq_lengths
    assert torch.equal(copy.cu_seqlens, batch.cu_seqlens)


def test_transformers_keywords_share_the_tensors() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    kwargs = to_transformers_kwargs(batch)
    assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"] is batch.cu_seqlens
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_lengths": ()}, "at least one document"),
        ({"seq_lengths": (3, 0)}, "length 0"),
        ({"seq_lengths": (3, -1)}, "length -1"),
        ({"seq_lengths": (3,), "num_padding": -2}, "num_padding=-2"),
        ({"seq_lengths": (3,), "labels": torch.zeros(2, dtype=torch.long)}, "labels has 2 tokens, the row has 3"),
    ],
)
def test_wrong_lengths_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.from_lengths(**arguments)  # type: ignore[arg-type]
