"""How the keys of rows with shared prefixes travel, and are merged."""

from __future__ import annotations

import copy
import itertools
import pickle

import torch
from hypothesis import example, given, settings
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
@example([(([1, 1], [-1, 0]), 3)])  # padding longer than any document
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


def test_keys_travel_with_the_batch_and_lie_in_its_block() -> None:
    batch = tree_row((2, 2, 1), (-1, 0, 0), num_padding=1)
    keys = batch.shared
    assert keys is not None
    tensors = {name: getattr(batch, name) for name in ("cu_seqlens", "position_ids", "seq_idx")}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | {"input_ids": (1, 6), "labels": (1, 6)}
    inputs, host = PackedInputs.empty(shapes, seq_lengths=batch.seq_lengths, num_padding=1, max_seqlen=2, shared=keys)
    for name, tensor in tensors.items():
        host[name][:] = tensor.reshape(-1).numpy()
    ways = (
        lambda one: one.to("cpu"),
        lambda one: pickle.loads(pickle.dumps(one)),
        copy.deepcopy,
        lambda one: one.to("meta"),
    )
    for way in ways:
        block = way(inputs)
        for moved in (way(batch).shared, block["packed_batch"].shared):
            assert (moved.prefix_lengths, moved.max_seqlen_k) == (keys.prefix_lengths, keys.max_seqlen_k)
            assert moved.key_index.device == moved.cu_seqlens_k.device == block["position_ids"].device
            if moved.key_index.device.type != "meta":
                assert torch.equal(moved.key_index, keys.key_index)
                assert torch.equal(moved.cu_seqlens_k, keys.cu_seqlens_k)
        assert moved.key_index.untyped_storage()._cdata == block["position_ids"].untyped_storage()._cdata
