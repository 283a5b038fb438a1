"""How the keys of rows with shared prefixes travel, and are merged."""

from __future__ import annotations

import copy
import itertools
import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_material import tree_row, trees

from fastpack_trl.packing.packed_batch import PackedBatch, merge_batches
from fastpack_trl.packing.packed_inputs import PackedInputs


def keys_of(batch: PackedBatch) -> list[list[int]]:
    """Tokens that each segment attends to, from the tensors."""
    if batch.shared is None:
        return [list(range(*pair)) for pair in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    ends = batch.shared.cu_seqlens_k.tolist()
    return [batch.shared.key_index[start:end].tolist() for start, end in itertools.pairwise(ends)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(trees(), st.integers(0, 3)), min_size=1, max_size=3))
def test_merged_rows_have_the_keys_of_one_row(rows: list[tuple[tuple[list[int], list[int]], int]]) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    batches, lengths, parents = [], [], []
    for (own, up), padding in rows:
        batch = tree_row(own, up, num_padding=padding)
        batches.append(copy.copy(batch))
        object.__setattr__(batches[-1], "loss_positions", nothing)
        object.__setattr__(batches[-1], "loss_labels", nothing)
        parents += [parent + len(lengths) * (parent >= 0) for parent in up]
        lengths += own
    merged, expected = merge_batches(batches), tree_row(lengths, parents)
    assert merged.seq_lengths == expected.seq_lengths
    assert torch.equal(merged.position_ids, expected.position_ids)
    assert keys_of(merged) == keys_of(expected)
    assert (merged.shared is None) == (expected.shared is None)
    if merged.shared is not None and expected.shared is not None:
        assert merged.shared.prefix_lengths == expected.shared.prefix_lengths
        assert merged.shared.max_seqlen_k == expected.shared.max_seqlen_k


def test_keys_travel_with_the_batch() -> None:
    batch = tree_row((2, 2, 1), (-1, 0, 0), num_padding=1)
    assert batch.shared is not None
    for moved in (batch.to("cpu"), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert moved.shared.prefix_lengths == batch.shared.prefix_lengths
        assert torch.equal(moved.shared.key_index, batch.shared.key_index)
    moved = batch.to("meta")
    assert moved.shared is not None
    assert moved.shared.key_index.device.type == moved.shared.cu_seqlens_k.device.type == "meta"


def test_keys_lie_in_the_block_of_the_batch() -> None:
    batch = tree_row((2, 2, 1), (-1, 0, 0))
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
