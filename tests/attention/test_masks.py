"""Backends that are asked for by name: their masks against the dense one, their refusals, their numbers."""

from __future__ import annotations

import pytest
import torch
from attention_material import CPU, prepared  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.reference import additive
from fastpack_trl.packing.packed_batch import PackedBatch

documents = st.lists(st.integers(1, 300), min_size=1, max_size=8)
windows = st.sampled_from([None, 1, 5, 128, 129, 200])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([None, 1, 3, 20]))
def test_dense_mask_is_causal_inside_each_segment(documents: list[int], window: int | None) -> None:
    batch = PackedBatch.from_lengths(documents)
    mask = dense_mask(batch, window, CPU)[0, 0]
    segment, position = batch.seq_idx[0].tolist(), list(range(batch.total_tokens))
    for query in position:
        for key in position:
            inside = segment[query] == segment[key] and key <= query and (window is None or query - key < window)
            assert bool(mask[query, key]) == inside
    added = additive(mask)
    assert torch.equal(added == 0, mask)
    assert added.masked_select(~mask).eq(-torch.inf).all()


@settings(max_examples=20, deadline=None)
@given(documents, windows)
def test_xformers_mask_equals_the_dense_mask(lengths: list[int], window: int | None) -> None:
    pytest.importorskip("xformers", reason="an optional extra: pip install 'fastpack-trl[xformers]'")
    batch = PackedBatch.from_lengths(lengths)
    layer = prepared("xformers", batch, *({window} - {None}))
    total = batch.total_tokens
    allowed = layer.biases[window].materialize((1, 1, total, total)) == 0
    assert torch.equal(allowed, dense_mask(batch, window, CPU))
