"""The static form of a row equals the plain one, in shapes that do not depend on it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from static_material import bucket_for, collate_shared, make_inputs, make_rows, rows, shared_rows, surplus, to_static

from fastpack_trl.packing.buckets import Bucket, RowSize, sizes_with_keys
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs
from fastpack_trl.packing.shared_keys import Documents, SharedKeys
from fastpack_trl.packing.static_batch import StaticInputs, copy_into, is_as_collated
from fastpack_trl.testing import count_host_syncs


def assert_same_row(static: StaticInputs, inputs: Any) -> None:
    """Everything of the plain form is recovered, exactly, from the static tensors; what is beyond it is harmless."""
    plain, batch, bucket = inputs["packed_batch"], static.batch, static.bucket
    tokens, documents, counted = sum(plain.seq_lengths), len(plain.seq_lengths), plain.loss_positions.numel()
    assert static.keywords.keys() == {"input_ids", "labels", "packed_batch", *to_transformers_kwargs(batch)}
    assert batch.total_tokens == bucket.tokens
    assert batch.max_seqlen == batch.bucketed_max_seqlen == bucket.max_seqlen
    for name in ("input_ids", "position_ids", "seq_idx") + ("labels",) * (not bucket.keys):
        assert static.keywords[name].shape == (1, bucket.tokens), name
        assert torch.equal(static.keywords[name][:, :tokens], inputs[name][:, :tokens]), name
    assert len(batch.cu_seqlens) == bucket.segments + 1
    assert torch.equal(batch.cu_seqlens[: documents + 1], plain.cu_seqlens[: documents + 1])
    assert batch.loss_mask.tolist() == [True] * counted + [False] * (bucket.loss_tokens - counted)
    for name, end in (("loss_positions", bucket.tokens), ("loss_labels", 96)):
        values = getattr(batch, name)
        assert len(values) == bucket.loss_tokens
        assert torch.equal(values[:counted], getattr(plain, name)), name
        assert ((values >= 0) & (values < end)).all(), name
    parts = [part.tokens for part in plain.parts] or [tokens]
    assert batch.part_bounds[0] == 0
    assert batch.part_bounds.diff().tolist() == [*parts, *[0] * (bucket.parts - len(parts))]
    # Beyond: segments of a length that the kernel takes, up to the end of the row; no label; tokens of the row.
    lengths = batch.cu_seqlens.diff()
    assert 0 <= lengths.min() <= lengths.max() <= bucket.max_seqlen
    assert batch.cu_seqlens[-1] == bucket.tokens
    assert batch.seq_idx.tolist() == [[index for index, n in enumerate(lengths.tolist()) for _ in range(n)]]
    assert (static.keywords["labels"][:, 0 if bucket.keys else tokens :] == IGNORE_INDEX).all()
    ids = static.keywords["input_ids"][0]
    assert torch.equal(ids, ids[:tokens].repeat(bucket.tokens // tokens + 1)[: bucket.tokens])
    longest = max(plain.documents.lengths if plain.documents else plain.seq_lengths)
    assert 0 <= batch.position_ids.min() <= batch.position_ids.max() < longest
    assert (batch.shared is None) == (batch.documents is None) == (not bucket.keys)
    if bucket.keys:
        assert_same_keys(static, plain)


def assert_same_keys(static: StaticInputs, plain: PackedBatch) -> None:
    """Each document sees what it sees in the row, the tail what is left and itself; a token counts as often."""
    bucket, shared, documents = static.bucket, static.batch.shared, static.batch.documents
    tokens, segments, counted = sum(plain.seq_lengths), len(plain.seq_lengths), plain.loss_positions.numel()
    queries, ends = static.batch.cu_seqlens.tolist(), shared.cu_seqlens_k.tolist()
    index = shared.key_index.tolist()
    assert 0 <= min(index) <= max(index) < bucket.tokens
    own = plain.shared or SharedKeys.own(plain.cu_seqlens, plain.segment_lengths)
    real = own.key_index.numel() - plain.num_padding
    assert index[:real] == own.key_index[:real].tolist()
    assert ends[: segments + 1] == own.cu_seqlens_k.tolist()[: segments + 1]
    assert ends[-1] == bucket.keys
    for (first, end), (start, stop) in zip(pairwise(queries), pairwise(ends), strict=True):
        assert stop - start <= bucket.max_seqlen_k
        assert index[start:stop][stop - start - (end - first) :] == list(range(first, end)), "itself, last"
        assert end > first or stop == start, "no key without a query"
    expected = plain.documents or Documents.own(plain.seq_lengths, plain.loss_positions, 0)
    assert documents.loss_weights.tolist() == [*expected.loss_weights.tolist(), *[0] * (bucket.loss_tokens - counted)]
    assert documents.copies.tolist() == [*expected.copies[:tokens].tolist(), *[0] * (bucket.tokens - tokens)]


@settings(max_examples=100, deadline=None)
@given(rows | shared_rows, surplus)
@example(make_inputs([7]), {})  # full
@example(make_inputs([3, 4], ignored=1.0), {"loss": 5, "tail": 2})
def test_the_static_form_equals_the_plain_row(inputs: Any, more: dict[str, int]) -> None:
    assert_same_row(to_static(inputs, bucket_for(inputs, **more)), inputs)


@settings(max_examples=60, deadline=None)
@given(rows | shared_rows, rows | shared_rows, surplus)
def test_the_same_tensors_hold_one_row_after_the_other(first: Any, second: Any, more: dict[str, int]) -> None:
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
    tensors = {name: value for name, value in static.keywords.items() if isinstance(value, torch.Tensor)}
    edits = {name: tensor._version for name, tensor in tensors.items()}
    with count_host_syncs(device="cpu") as syncs:
        copy_into(static, second)
    assert syncs.total == 0, syncs
    assert_same_row(static, second)
    assert all(static.keywords[name] is tensor for name, tensor in tensors.items())
    assert {name: tensor._version for name, tensor in tensors.items()} == edits, "a copy is no edit"
    assert static.batch.counts(static.keywords["labels"])
    assert static.batch.describes(static.keywords["input_ids"], static.keywords["position_ids"])
    static.keywords["labels"][0, 0] = 5
    assert not static.batch.counts(static.keywords["labels"]), "an edit of somebody else is one"


def test_what_the_host_knows_of_a_row_raises_in_its_static_form() -> None:
    inputs = make_rows([[3, 2], [4]])
    batch = to_static(inputs, bucket_for(inputs)).batch
    known = (lambda: sum(batch.seq_lengths), lambda: batch.parts[0], lambda: range(batch.num_padding))
    for use in (*known, lambda: len(batch.seq_lengths), lambda: batch.num_padding > 0, lambda: RowSize.of(batch)):
        with pytest.raises(TypeError):
            use()
    assert batch.is_static
    assert not inputs["packed_batch"].is_static
    moved = batch.to("meta")
    assert moved.is_static
    assert moved.loss_mask.device.type == "meta"


@pytest.mark.parametrize("name", Bucket._fields)
def test_a_row_that_does_not_fit_is_refused_by_name(name: str) -> None:
    inputs = make_rows([[3, 2], [4]])
    bucket = bucket_for(inputs, keyed=name in ("keys", "max_seqlen_k"))
    small = bucket._replace(**{name: getattr(bucket, name) - 1})
    with pytest.raises(ValueError, match=r"does not fit into Bucket\(.*ask Bucket.holds before"):
        to_static(inputs, small)


def test_a_row_that_was_changed_is_refused() -> None:
    bucket = bucket_for(make_inputs([3, 2]))
    for name, change in {
        "labels": lambda labels: labels.fill_(7),
        "attention_mask": lambda _: torch.ones(1, 5),
        "input_ids": lambda ids: ids[:, :4],
        "position_ids": torch.clone,
        "packed_batch": lambda _: to_static(make_inputs([3, 2]), bucket).batch,
    }.items():
        inputs = make_inputs([3, 2])
        assert is_as_collated(inputs)
        inputs[name] = change(inputs.get(name))
        assert not is_as_collated(inputs), name
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
    inputs = collate_shared({"input_ids": np.tile(np.arange(5), 3), "seq_lengths": np.array([5, 5, 5])})
    batch = inputs["packed_batch"]
    assert batch.shared is None
    size = RowSize.of(batch)
    assert (size.keys, size.max_seqlen_k) == (5, 5)
    assert not bucket_for(inputs)._replace(keys=0, max_seqlen_k=0).holds(size), "its loss would count each once"
    static = to_static(inputs, bucket_for(inputs, tail=3, keys=2))
    assert static.batch.documents.loss_weights.tolist() == [3.0] * 4
    assert_same_row(static, inputs)


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
    assert_same_row(static, second)
