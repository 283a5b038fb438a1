"""`PackedBatch.from_segments`: trees of documents against a loop over tokens, and how their keys travel."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_material import path_of, trees

from fastpack_trl.packing.packed_batch import PackedBatch, merge_batches
from fastpack_trl.packing.packed_inputs import PackedInputs


def keys_of(batch: PackedBatch) -> list[list[int]]:
    """Tokens that each segment attends to, from the tensors."""
    if batch.shared is None:
        return [list(range(*pair)) for pair in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    ends = batch.shared.cu_seqlens_k.tolist()
    return [batch.shared.key_index[start:end].tolist() for start, end in itertools.pairwise(ends)]


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 3))
def test_positions_and_keys_agree_with_a_loop_over_tokens(tree: tuple[list[int], list[int]], padding: int) -> None:
    lengths, parents = tree
    batch = PackedBatch.from_segments(lengths, parents, num_padding=padding)
    paths = [path_of(lengths, parents, piece) for piece in range(len(lengths))]
    starts = [sum(lengths[:piece]) for piece in range(len(lengths))]
    positions = [len(path) - length + i for path, length in zip(paths, lengths, strict=True) for i in range(length)]
    assert batch.position_ids.tolist() == [positions + list(range(padding))]
    assert batch.position_ids.dtype == torch.int64
    assert sum(batch.seq_lengths) == sum(lengths)
    segment = batch.seq_idx[0].tolist()
    keys = keys_of(batch)
    for piece, path in enumerate(paths):
        seen = keys[segment[starts[piece]]]
        # A segment has the pieces that follow its first one directly; a query sees the keys up to itself.
        assert seen[: len(path)] == path
    total = sum(lengths)
    assert not padding or keys[-1] == list(range(total, total + padding))
    for first, (own, seen) in enumerate(zip(batch.segment_lengths, keys, strict=True)):
        assert seen[-own:] == list(range(batch.cu_seqlens[first], batch.cu_seqlens[first + 1]))
    if batch.shared is not None:
        shared = batch.shared
        assert shared.cu_seqlens_k.dtype == torch.int32
        assert shared.key_index.dtype == torch.int64
        assert shared.max_seqlen_k == max(map(len, keys))
        assert shared.prefix_lengths == tuple(
            len(seen) - own for own, seen in zip(batch.segment_lengths, keys, strict=True)
        )


def test_a_family_is_the_worked_example() -> None:
    batch = PackedBatch.from_segments((2, 2, 1), (-1, 0, 0))
    assert batch.seq_lengths == (4, 1)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.shared is not None
    assert batch.shared.prefix_lengths == (0, 2)
    assert batch.shared.key_index.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert batch.shared.cu_seqlens_k.tolist() == [0, 4, 7]
    assert batch.shared.max_seqlen_k == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_without_parents_it_is_from_lengths(lengths: list[int], padding: int) -> None:
    plain = PackedBatch.from_lengths(lengths, num_padding=padding)
    batch = PackedBatch.from_segments(lengths, [-1] * len(lengths), num_padding=padding)
    assert batch.shared is None
    assert (batch.seq_lengths, batch.num_padding, batch.max_seqlen) == (
        plain.seq_lengths, plain.num_padding, plain.max_seqlen
    )  # fmt: skip
    for name in ("cu_seqlens", "position_ids", "seq_idx"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(trees(), st.integers(0, 3)), min_size=1, max_size=3))
def test_merged_rows_have_the_keys_of_one_row(rows: list[tuple[tuple[list[int], list[int]], int]]) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    batches, lengths, parents = [], [], []
    for (own, up), padding in rows:
        batch = PackedBatch.from_segments(own, up, num_padding=padding)
        batches.append(copy.copy(batch))
        object.__setattr__(batches[-1], "loss_positions", nothing)
        object.__setattr__(batches[-1], "loss_labels", nothing)
        parents += [parent + len(lengths) * (parent >= 0) for parent in up]
        lengths += own
    merged, expected = merge_batches(batches), PackedBatch.from_segments(lengths, parents)
    assert merged.seq_lengths == expected.seq_lengths
    assert torch.equal(merged.position_ids, expected.position_ids)
    assert keys_of(merged) == keys_of(expected)
    assert (merged.shared is None) == (expected.shared is None)
    if merged.shared is not None and expected.shared is not None:
        assert merged.shared.prefix_lengths == expected.shared.prefix_lengths
        assert merged.shared.max_seqlen_k == expected.shared.max_seqlen_k


def test_keys_travel_with_the_batch() -> None:
    batch = PackedBatch.from_segments((2, 2, 1), (-1, 0, 0), num_padding=1)
    assert batch.shared is not None
    for moved in (batch.to("cpu"), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert moved.shared.prefix_lengths == batch.shared.prefix_lengths
        assert torch.equal(moved.shared.key_index, batch.shared.key_index)
    moved = batch.to("meta")
    assert moved.shared is not None
    assert moved.shared.key_index.device.type == moved.shared.cu_seqlens_k.device.type == "meta"


def test_keys_lie_in_the_block_of_the_batch() -> None:
    batch = PackedBatch.from_segments((2, 2, 1), (-1, 0, 0))
    assert batch.shared is not None
    names = ("cu_seqlens", "position_ids", "seq_idx")
    shapes = {name: tuple(getattr(batch, name).shape) for name in names} | {"input_ids": (1, 5), "labels": (1, 5)}
    inputs, host = PackedInputs.empty(
        shapes, seq_lengths=batch.seq_lengths, num_padding=0, max_seqlen=4, shared=batch.shared
    )
    for name in names:
        host[name][:] = getattr(batch, name).reshape(-1).numpy()
    for copied in (inputs, pickle.loads(pickle.dumps(inputs)), inputs.copy(), inputs.to("meta")):
        keys = copied["packed_batch"].shared
        assert keys.prefix_lengths == batch.shared.prefix_lengths
        assert keys.max_seqlen_k == batch.shared.max_seqlen_k
        assert keys.key_index.untyped_storage()._cdata == copied["position_ids"].untyped_storage()._cdata
        if keys.key_index.device.type != "meta":
            assert torch.equal(keys.key_index, batch.shared.key_index)
            assert torch.equal(keys.cu_seqlens_k, batch.shared.cu_seqlens_k)


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((), (), "at least one document"),
        ((2, 1), (-1,), "1 parents for 2 segments"),
        ((2, 0), (-1, 0), "segment 1 has length 0: leave out"),
        ((2, 1), (-1, 1), "segment 1 has the parent 1: give an earlier segment"),
        ((2, 1), (-2, 0), "segment 0 has the parent -2"),
    ],
)
def test_wrong_trees_are_named(lengths: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.from_segments(lengths, parents)
