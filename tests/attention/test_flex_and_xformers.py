"""Backends that are asked for by name: their masks against the dense one, their refusals, their numbers."""

from __future__ import annotations

import pytest
import torch
from attention_material import CPU, assert_as_near_as_dense, attend, dense_attention, make_inputs, prepared  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from fastpack_trl.attention import flex
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


@settings(max_examples=40, deadline=None)
@given(documents, windows, st.sampled_from([0, 17]))
def test_flex_mask_is_the_dense_one_in_the_blocks_of_torch(
    lengths: list[int], window: int | None, padding: int
) -> None:
    """Torch looks at every pair of tokens; ours at two per pair of blocks."""
    batch = PackedBatch.from_lengths(lengths, num_padding=padding)
    total = batch.total_tokens
    ours = flex.block_mask(batch, window, CPU)
    assert torch.equal(create_mask(ours.mask_mod, 1, 1, total, total, "cpu"), dense_mask(batch, window, CPU))
    theirs = create_block_mask(ours.mask_mod, None, None, total, total, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 40], ids=["", "window"])
def test_flex_forward_equals_dense_attention(window: int | None, sinks: bool, softcap: float | None) -> None:
    """Forward only: flex has no backward on the CPU."""
    batch = PackedBatch.from_lengths((130, 60, 1))
    inputs = [tensor.detach() for tensor in make_inputs(batch, torch.float32, sinks=sinks)]
    out = attend(prepared("flex", batch, 40), window, softcap)(inputs)
    torch.testing.assert_close(out, dense_attention(batch, inputs, window, softcap), rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(documents, windows)
def test_xformers_mask_equals_the_dense_mask(lengths: list[int], window: int | None) -> None:
    pytest.importorskip("xformers", reason="an optional extra: pip install 'fastpack-trl[xformers]'")
    batch = PackedBatch.from_lengths(lengths)
    layer = prepared("xformers", batch, *({window} - {None}))
    total = batch.total_tokens
    allowed = layer.biases[window].materialize((1, 1, total, total)) == 0
    assert torch.equal(allowed, dense_mask(batch, window, CPU))


@pytest.mark.cuda
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 40], ids=["", "window"])
def test_flex_on_the_device_within_twice_the_error_of_dense_attention(window: int | None, sinks: bool) -> None:
    batch = PackedBatch.from_lengths((130, 60, 1, 65))
    ours = attend(prepared("flex", batch, 40, device="cuda"), window, device="cuda")
    least = 16  # that flex's kernels take
    assert_as_near_as_dense(batch, ours, window, dtype=torch.bfloat16, floor=2**-8, sinks=sinks, head_dim=least)
