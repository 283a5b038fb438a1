"""The static form of a row equals the plain one, in shapes that do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from static_material import bucket_for, make_inputs, make_rows, rows, surplus, to_static

from fastpack_trl.attention.row_backend import attend_blocks
from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.buckets import Bucket, Buckets
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.packing.shared_keys import SharedKeys
from fastpack_trl.packing.static_batch import StaticInputs
from fastpack_trl.testing import count_host_syncs


def assert_same_row(static: StaticInputs, inputs: Any) -> None:
    """Everything of the plain form is recovered, exactly, from the static tensors; what is beyond it is harmless."""
    plain, batch, bucket = inputs["packed_batch"], static.batch, static.bucket
    tokens, segments = plain.total_tokens, len(plain.segment_lengths)
    assert static.keywords.keys() == {"input_ids", "packed_batch", *to_transformers_kwargs(batch)}
    assert batch.max_seqlen == batch.bucketed_max_seqlen == bucket.max_seqlen
    for name in ("input_ids", "position_ids", "seq_idx"):
        assert static.keywords[name].shape == (1, bucket.tokens), name
        assert torch.equal(static.keywords[name][:, :tokens], inputs[name]), name
    assert len(batch.cu_seqlens) == bucket.segments + 1
    assert torch.equal(batch.cu_seqlens[: segments + 1], plain.cu_seqlens)
    # Beyond: segments of a length that the kernel takes, up to the end of the row; tokens of the row.
    lengths = batch.cu_seqlens.diff()
    assert 0 <= lengths.min() <= lengths.max() <= bucket.max_seqlen
    assert batch.cu_seqlens[-1] == bucket.tokens
    assert batch.seq_idx.tolist() == [[index for index, n in enumerate(lengths.tolist()) for _ in range(n)]]
    ids = static.keywords["input_ids"][0]
    assert torch.equal(ids, ids[:tokens].repeat(bucket.tokens // tokens + 1)[: bucket.tokens])
    longest = max(*(plain.documents.lengths if plain.documents else plain.seq_lengths), plain.num_padding)
    assert 0 <= batch.position_ids.min() <= batch.position_ids.max() < longest
    assert (batch.shared is None) == (not bucket.keys)
    if bucket.keys:
        assert_same_keys(static, plain)


def assert_same_keys(static: StaticInputs, plain: PackedBatch) -> None:
    """Each document sees what it sees in the row, the tail what is left and itself."""
    bucket, shared, segments = static.bucket, static.batch.shared, len(plain.segment_lengths)
    queries, ends = static.batch.cu_seqlens.tolist(), shared.cu_seqlens_k.tolist()
    index = shared.key_index.tolist()
    assert 0 <= min(index) <= max(index) < bucket.tokens
    own = plain.shared or SharedKeys.own(plain.cu_seqlens, plain.segment_lengths)
    assert index[: own.key_index.numel()] == own.key_index.tolist()
    assert ends[: segments + 1] == own.cu_seqlens_k.tolist()
    assert ends[-1] == bucket.keys
    for (first, end), (start, stop) in zip(pairwise(queries), pairwise(ends), strict=True):
        assert stop - start <= bucket.max_seqlen_k
        assert index[start:stop][stop - start - (end - first) :] == list(range(first, end)), "itself, last"
        assert end > first or stop == start, "no key without a query"


@settings(max_examples=60, deadline=None)
@given(rows, rows, surplus)
def test_the_same_tensors_hold_one_row_after_the_other(first: Any, second: Any, more: dict[str, int]) -> None:
    sizes = [Bucket.of(inputs["packed_batch"]) for inputs in (first, second)]
    sizes = [size.with_keys for size in sizes] if any(size.keys for size in sizes) else sizes
    bucket = Bucket(*map(max, zip(*sizes, strict=True)))
    tokens = bucket.tokens + more["tail"] + bool(bucket.keys)
    bucket = bucket._replace(tokens=tokens, max_seqlen=bucket.max_seqlen + more["longer"])
    if bucket.keys:
        keys = max(size.keys + bucket.tokens - size.tokens for size in sizes) + more["keys"]
        bucket = bucket._replace(keys=keys, max_seqlen_k=max(bucket.max_seqlen_k, keys - min(s.keys for s in sizes)))
    needed = max(size.segments + bucket.pieces_of(size) for size in sizes)
    static = to_static(first, bucket._replace(segments=needed + more["segments"]))
    assert_same_row(static, first)
    tensors = {name: value for name, value in static.keywords.items() if isinstance(value, torch.Tensor)}
    with count_host_syncs(device="cpu") as syncs:
        static.copy_row(second["packed_batch"], second["input_ids"])
    assert syncs.total == 0, syncs
    assert_same_row(static, second)
    assert all(static.keywords[name] is tensor for name, tensor in tensors.items())
    assert static.batch.describes(static.keywords["input_ids"], static.keywords["position_ids"])


def test_what_the_host_knows_of_a_row_raises_in_its_static_form() -> None:
    inputs = make_rows([[3, 2], [4]])
    batch = to_static(inputs, bucket_for(inputs)).batch
    for use in (
        lambda: sum(batch.seq_lengths), lambda: batch.parts[0], lambda: range(batch.num_padding),
        lambda: len(batch.seq_lengths), lambda: batch.num_padding > 0,
    ):  # fmt: skip
        with pytest.raises(TypeError):
            use()
    assert batch.is_static
    assert not inputs["packed_batch"].is_static
    assert batch.to("meta").is_static


@pytest.mark.parametrize("name", Bucket._fields)
def test_a_row_that_does_not_fit_is_not_copied(name: str) -> None:
    inputs = make_rows([[3, 2], [4]])
    bucket = bucket_for(inputs, keyed=name in ("keys", "max_seqlen_k"))
    with pytest.raises(AssertionError, match=r"does not fit into Bucket\("):
        to_static(inputs, bucket._replace(**{name: getattr(bucket, name) - 1}))


def test_keys_that_are_left_over_need_a_tail_that_sees_them() -> None:
    inputs = make_inputs([9, 9, 9], shared=True)
    size = Bucket.of(inputs["packed_batch"])
    assert size.keys > size.tokens, "documents that share see more keys than the row has tokens"
    full = bucket_for(inputs)
    assert full.holds(size)
    assert not full._replace(keys=full.keys + 5, segments=9).holds(size), "no token is there to see them"
    assert full._replace(keys=full.keys + 5, tokens=full.tokens + 1, segments=9).holds(size)
    assert not full._replace(keys=full.keys + 5, tokens=full.tokens + 6, segments=9).holds(size), "nor a key for each"
    assert not full._replace(keys=0).holds(size)


def row_of_images(seed: int) -> tuple[Any, Blocks | None]:
    """A row, the tokens of whose images attend to each other; each third row has none."""
    draw = np.random.default_rng(seed)
    inputs = make_inputs(draw.integers(1, 40, draw.integers(1, 6)).tolist(), seed=seed)
    batch = inputs["packed_batch"]
    image = draw.random(batch.total_tokens).repeat(5)[: batch.total_tokens] < 0.6 * (seed % 3 > 0)
    blocks = Blocks.of(image, np.array(batch.seq_lengths))
    inputs["packed_batch"] = replace(batch, blocks=blocks)
    return inputs, blocks


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_images_of_a_static_row_see_what_they_see_in_the_row(device: str) -> None:
    """Outputs and gradients of one set of tensors for row after row; what is left over is finite and of the tail."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    rows = [row_of_images(seed) for seed in range(24)]
    sizes = [Bucket.of(inputs["packed_batch"]) for inputs, _ in rows]
    bucket = Buckets().find(reduce(Bucket.joined, sizes))
    assert bucket is not None
    assert all(map(bucket.holds, sizes))
    static = StaticInputs(bucket, device)
    torch.manual_seed(0)
    for inputs, plain in rows:
        given = inputs.to(device)
        with count_host_syncs(device=device) as syncs:
            static.copy_row(given["packed_batch"], given["input_ids"])
        assert syncs.total == 0, syncs
        found, tokens = static.batch.blocks, given["packed_batch"].total_tokens
        assert found is not None
        count = 0 if plain is None else len(plain.tokens)
        assert found.tokens[count:].min() >= tokens
        queries, keys = found.cu_seqlens.diff(), found.cu_seqlens_k.diff()
        assert torch.equal(queries > 0, keys > 0)
        assert max(queries.max(), keys.max()) <= bucket.max_seqlen
        assert [found.cu_seqlens[-1], found.cu_seqlens_k[-1]] == [len(found.tokens), len(found.key_index)]
        wide = torch.randn(3, bucket.tokens, 2, 8, dtype=dtype, device=device, requires_grad=True)
        for window in (None, 5):
            out = attend_blocks(found, *wide, 0.3, window)
            assert out.isfinite().all()
            up = torch.randn_like(out)
            up[count:] = 0  # as the loss has none there
            (gradient,) = torch.autograd.grad(out, wide, up)
            assert not gradient[:, tokens:].any()
            if plain is not None:
                expected = attend_blocks(plain.to(device), *wide, 0.3, window)
                torch.testing.assert_close(out[:count], expected)
                torch.testing.assert_close(gradient, *torch.autograd.grad(expected, wide, up[:count]))


@pytest.mark.cuda
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_on_cuda_a_copy_asks_nothing_and_writes_the_tensors_that_are_there(shared: bool) -> None:
    first, second = (make_inputs([5, 9, 9], seed=seed, shared=shared).to("cuda") for seed in (0, 1))
    static = to_static(first, Bucket(64, 20, 20, 200 * shared, 90 * shared))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.copy_row(second["packed_batch"], second["input_ids"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_row(static, second)
