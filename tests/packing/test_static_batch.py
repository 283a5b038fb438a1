"""The static form of a row says the same as the plain one, in shapes that do not depend on it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from static_material import bucket_for, make_inputs, make_rows, rows, shared_rows, surplus, to_static

from fastpack_trl.packing.buckets import Bucket, RowSize, sizes_with_keys
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs
from fastpack_trl.packing.prefixes import share
from fastpack_trl.packing.shared_keys import Documents, SharedKeys
from fastpack_trl.packing.static_batch import StaticInputs, copy_into, is_as_collated
from fastpack_trl.testing import count_host_syncs

TENSORS = ("position_ids", "seq_idx", "cu_seqlens", "loss_positions", "loss_labels", "loss_mask", "part_bounds")


def assert_says_the_same(static: StaticInputs, inputs: Any) -> None:
    """Everything of the plain form is recovered, exactly, from the static tensors; what is beyond it is harmless."""
    plain, batch, bucket = inputs["packed_batch"], static.batch, static.bucket
    tokens, documents, counted = sum(plain.seq_lengths), len(plain.seq_lengths), plain.loss_positions.numel()
    for name in ("input_ids", "position_ids") if bucket.keys else ("input_ids", "labels", "position_ids"):
        assert torch.equal(static.keywords[name][:, :tokens], inputs[name][:, :tokens]), name
    assert torch.equal(batch.seq_idx[:, :tokens], plain.seq_idx[:, :tokens])
    assert torch.equal(batch.cu_seqlens[: documents + 1], plain.cu_seqlens[: documents + 1])
    assert batch.loss_mask is not None
    assert batch.loss_mask.nonzero()[:, 0].tolist() == list(range(counted))
    assert torch.equal(batch.loss_positions[batch.loss_mask], plain.loss_positions)
    assert torch.equal(batch.loss_labels[batch.loss_mask], plain.loss_labels)
    parts = [part.tokens for part in plain.parts] or [tokens]
    assert batch.part_bounds.diff().tolist() == [*parts, *[0] * (bucket.parts - len(parts))]
    assert batch.part_bounds[0] == 0
    # Beyond: segments of a length that the kernel takes, up to the end of the row; no label; valid indices.
    lengths = batch.cu_seqlens.diff()
    assert (lengths >= 0).all()
    assert lengths.max() <= bucket.max_seqlen
    assert batch.cu_seqlens[-1] == bucket.tokens
    assert torch.equal(
        batch.seq_idx[0],
        torch.arange(bucket.segments, dtype=torch.int32, device=lengths.device).repeat_interleave(lengths.long()),
    )
    assert (static.keywords["labels"][:, 0 if bucket.keys else tokens :] == IGNORE_INDEX).all()
    ids = static.keywords["input_ids"][0]
    assert torch.equal(ids, ids[:tokens].repeat(bucket.tokens // tokens + 1)[: bucket.tokens])
    longest = max(plain.documents.lengths if plain.documents else plain.seq_lengths)
    assert 0 <= batch.position_ids.min() <= batch.position_ids.max() < longest
    assert (batch.shared is None) == (batch.documents is None) == (not bucket.keys)
    if bucket.keys:
        assert_same_keys(static, plain)
    for values, end in (
        (batch.loss_positions, bucket.tokens),
        (batch.loss_labels, 96),
        (static.keywords["input_ids"], 96),
    ):
        assert ((values >= 0) & (values < end)).all()


def assert_same_keys(static: StaticInputs, plain: PackedBatch) -> None:
    """Each document sees what it sees in the row, the tail what is left and itself; a token counts as often."""
    bucket, shared, documents = static.bucket, static.batch.shared, static.batch.documents
    tokens, segments, counted = sum(plain.seq_lengths), len(plain.seq_lengths), plain.loss_positions.numel()
    queries, ends = static.batch.cu_seqlens.tolist(), shared.cu_seqlens_k.tolist()
    index = shared.key_index.tolist()
    assert ((shared.key_index >= 0) & (shared.key_index < bucket.tokens)).all()
    own = plain.shared or SharedKeys.own(plain.cu_seqlens, plain.segment_lengths)
    real = own.key_index.numel() - plain.num_padding
    assert index[:real] == own.key_index[:real].tolist()
    assert ends[: segments + 1] == own.cu_seqlens_k.tolist()[: segments + 1]
    assert ends[-1] == bucket.keys
    for (first, end), (start, stop) in zip(pairwise(queries), pairwise(ends), strict=True):
        assert stop - start <= bucket.max_seqlen_k
        assert index[start:stop][len(range(start, stop)) - (end - first) :] == list(range(first, end)), "itself, last"
        assert end > first or stop == start, "no key without a query"
    expected = plain.documents or Documents.own(plain.seq_lengths, plain.loss_positions, 0)
    assert documents.loss_weights.tolist() == [*expected.loss_weights.tolist(), *[0] * (bucket.loss_tokens - counted)]
    assert documents.copies.tolist() == [*expected.copies[:tokens].tolist(), *[0] * (bucket.tokens - tokens)]


def assert_shapes(static: StaticInputs) -> None:
    batch, bucket = static.batch, static.bucket
    expected = {
        "position_ids": (1, bucket.tokens), "seq_idx": (1, bucket.tokens), "cu_seqlens": (bucket.segments + 1,),
        "loss_positions": (bucket.loss_tokens,), "loss_labels": (bucket.loss_tokens,),
        "loss_mask": (bucket.loss_tokens,), "part_bounds": (bucket.parts + 1,),
    }  # fmt: skip
    assert {name: tuple(getattr(batch, name).shape) for name in TENSORS} == expected
    assert batch.total_tokens == bucket.tokens
    assert batch.max_seqlen == batch.bucketed_max_seqlen == bucket.max_seqlen
    assert static.keywords.keys() == {"input_ids", "labels", "packed_batch", *to_transformers_kwargs(batch)}


@settings(max_examples=100, deadline=None)
@given(rows | shared_rows, surplus)
def test_the_static_form_says_the_same(inputs: Any, more: dict[str, int]) -> None:
    static = to_static(inputs, bucket_for(inputs, **more))
    assert_shapes(static)
    assert_says_the_same(static, inputs)


@settings(max_examples=60, deadline=None)
@given(rows | shared_rows, rows | shared_rows, surplus)
def test_the_same_tensors_say_the_same_of_one_row_after_the_other(
    first: Any, second: Any, more: dict[str, int]
) -> None:
    sizes = sizes_with_keys([RowSize.of(inputs["packed_batch"]) for inputs in (first, second)])
    largest = Bucket(*map(max, zip(*sizes, strict=True)))
    bucket = largest._replace(
        tokens=largest.tokens + more["tail"] + 1, max_seqlen=largest.max_seqlen + more["longer"],
        loss_tokens=largest.loss_tokens + more["loss"], parts=largest.parts + more["parts"],
    )  # fmt: skip
    if bucket.keys:
        keys = max(size.keys + bucket.tokens - size.tokens for size in sizes) + more["keys"]
        bucket = bucket._replace(keys=keys, max_seqlen_k=max(largest.max_seqlen_k, keys - min(s.keys for s in sizes)))
    bucket = bucket._replace(segments=max(bucket.segments_of(size) for size in sizes) + more["segments"])
    static = to_static(first, bucket)
    before = {
        name: (value, value._version) for name, value in static.keywords.items() if isinstance(value, torch.Tensor)
    }
    with count_host_syncs(device="cpu") as syncs:
        copy_into(static, second)
    assert syncs.total == 0, syncs
    assert_says_the_same(static, second)
    assert_shapes(static)
    for name, (tensor, edits) in before.items():
        assert static.keywords[name] is tensor
        assert tensor._version == edits, "a copy is no edit: `TensorVersion` would take the labels for edited"
    assert static.batch.counts(static.keywords["labels"])
    assert static.batch.describes(static.keywords["input_ids"], static.keywords["position_ids"])
    static.keywords["labels"][0, 0] = 5
    assert not static.batch.counts(static.keywords["labels"]), "an edit of somebody else is one"


def test_what_the_host_knows_of_a_row_is_not_in_its_static_form() -> None:
    inputs = make_rows([[3, 2], [4]])
    batch = to_static(inputs, bucket_for(inputs)).batch
    for use in (
        lambda: sum(batch.seq_lengths), lambda: len(batch.seq_lengths), lambda: max(batch.seq_lengths),
        lambda: list(batch.parts), lambda: batch.parts[0], lambda: batch.total_tokens - batch.num_padding,
        lambda: range(batch.num_padding), lambda: batch.num_padding > 0, lambda: RowSize.of(batch),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            use()
    assert batch.is_static
    assert not inputs["packed_batch"].is_static
    moved = batch.to("meta")
    assert moved.is_static
    assert moved.loss_mask.device.type == "meta"


def test_edges_of_a_row() -> None:
    static = to_static(full := make_inputs([7]), bucket_for(full))
    assert static.batch.cu_seqlens.tolist() == static.batch.part_bounds.tolist() == [0, 7]
    assert static.batch.loss_mask.all()
    assert_says_the_same(static, full)
    static = to_static(ignored := make_inputs([3, 4], ignored=1.0), bucket_for(ignored, loss=5, tail=2))
    assert static.batch.loss_mask.tolist() == [False] * 5
    assert_says_the_same(static, ignored)


@pytest.mark.parametrize("name", Bucket._fields)
def test_a_row_that_does_not_fit_is_refused_by_name(name: str) -> None:
    inputs = make_rows([[3, 2], [4]])
    bucket = bucket_for(inputs, keyed=name in ("keys", "max_seqlen_k"))
    small = bucket._replace(**{name: getattr(bucket, name) - 1})
    with pytest.raises(ValueError, match=r"does not fit into Bucket\(.*ask Bucket.holds before"):
        to_static(inputs, small)


def test_a_row_that_was_changed_is_refused() -> None:
    def edited(inputs: Any) -> None:
        inputs["labels"][0, 1] = 7

    def more(inputs: Any) -> None:
        inputs["attention_mask"] = torch.ones(1, 5)

    def cut(inputs: Any) -> None:
        inputs["input_ids"] = inputs["input_ids"][:, :4]

    def positions(inputs: Any) -> None:
        inputs["position_ids"] = inputs["position_ids"].clone()

    def static(inputs: Any) -> None:
        inputs["packed_batch"] = to_static(make_inputs([3, 2]), bucket).batch

    bucket = bucket_for(make_inputs([3, 2]))
    for change in (edited, more, cut, positions, static):
        inputs = make_inputs([3, 2])
        assert is_as_collated(inputs)
        change(inputs)
        assert not is_as_collated(inputs)
        with pytest.raises(ValueError, match="changed after collation"):
            copy_into(StaticInputs(bucket, "cpu"), inputs)
    inputs = make_inputs([3, 2])
    inputs["input_ids"][0, 0] = 9  # tokens may be others: nothing was made from them
    assert to_static(inputs, bucket).keywords["input_ids"][0, 0] == 9


def test_keys_that_are_left_over_need_a_tail_that_sees_them() -> None:
    inputs = make_inputs([9, 9, 9], shared=True)
    size = RowSize.of(inputs["packed_batch"])
    assert size.keys > size.tokens, "documents that share see more keys than the row has tokens"
    full = bucket_for(inputs)
    assert full.holds(size)
    assert not full._replace(keys=full.keys + 5, segments=9).holds(size), "no token is there to see them"
    assert full._replace(keys=full.keys + 5, tokens=full.tokens + 1, segments=9).holds(size)
    assert not full._replace(keys=full.keys + 5, tokens=full.tokens + 6, segments=9).holds(size), "nor a key for each"
    assert not full._replace(keys=0).holds(size)


def test_equal_documents_alone_need_a_bucket_with_weights() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastpack_trl.packing.collator.share", partial(share, least=1))
        row = {"input_ids": np.tile(np.arange(5), 3), "seq_lengths": np.array([5, 5, 5])}
        inputs = PackingCollator(pad_token_id=0, share_prefixes=True)([row])
    batch = inputs["packed_batch"]
    assert batch.shared is None
    size = RowSize.of(batch)
    assert (size.keys, size.max_seqlen_k) == (5, 5)
    assert not bucket_for(inputs)._replace(keys=0, max_seqlen_k=0).holds(size), "its loss would count each once"
    static = to_static(inputs, bucket_for(inputs, tail=3, keys=2))
    assert static.batch.documents.loss_weights.tolist() == [3.0] * 4
    assert_says_the_same(static, inputs)


@pytest.mark.cuda
def test_on_cuda_a_copy_asks_nothing_and_writes_the_tensors_that_are_there() -> None:
    first, second = (make_rows([[5, 9], [3]], ignored=share, device="cuda") for share in (0.0, 0.5))
    static = to_static(first, bucket_for(first, tail=7, segments=3, loss=4, parts=1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy_into(static, second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_says_the_same(static, second)
