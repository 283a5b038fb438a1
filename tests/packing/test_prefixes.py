"""Shared prefixes on the host: documents, and what the loss counts of them, are those of the plain row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain, combinations, pairwise, takewhile
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_material import seen_by, tree_row, trees
from static_material import collate_shared

from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, merge_batches
from fastpack_trl.packing.prefixes import share

documents = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=7)
"""Of three kinds of token: many are equal, contained in others, or begin alike."""


@settings(max_examples=80, deadline=None)
@given(documents, st.integers(1, 3))
def test_the_row_has_every_document_and_nothing_twice(drawn: list[list[int]], least: int) -> None:
    ids = np.array([*chain(*drawn)])
    row = share(ids, [len(document) for document in drawn], least)
    if row is None:
        alike = (takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)) for pair in combinations(drawn, 2))
        assert all(len(list(common)) < least for common in alike)
        return
    batch = PackedBatch.from_lengths(row.lengths, prefixes=(row.first_positions, row.key_index))
    in_row = ids[row.source_of]
    assert row.token_of[row.source_of].tolist() == list(range(len(in_row)))
    assert in_row[row.token_of].tolist() == ids.tolist()
    assert batch.shared is None or len(batch.shared.key_index) == batch.shared.cu_seqlens_k[-1]
    for start, end in pairwise(accumulate(map(len, drawn), initial=0)):
        path = row.token_of[start:end].tolist()
        for place, token in enumerate(path):
            assert seen_by(batch, token) == path[: place + 1]
            assert batch.position_ids[0, token] == place
    if least == 1:
        # As few tokens as a tree of the documents has nodes.
        nodes = {tuple(document[: place + 1]) for document in drawn for place in range(len(document))}
        assert len(in_row) == len(nodes)


def counted(inputs: Any) -> Counter[tuple[int, ...]]:
    """The tokens that the loss counts, each with all tokens before it, and how often."""
    batch, ids, counts = inputs["packed_batch"], inputs["input_ids"][0], Counter[tuple[int, ...]]()
    positions, labels = batch.loss_positions.tolist(), batch.loss_labels.tolist()
    weights = batch.documents.loss_weights.tolist() if batch.documents else [1] * len(positions)
    for position, label, weight in zip(positions, labels, weights, strict=True):
        counts[(*ids[seen_by(batch, position)].tolist(), label)] += int(weight)
    return counts


@settings(max_examples=60, deadline=None)
@given(documents, st.sampled_from([None, 8]), st.data())
def test_collated_rows_count_as_plain_rows(drawn: list[list[int]], multiple: int | None, data: st.DataObject) -> None:
    ids = [*chain(*drawn)]
    # Half of the labels are their own tokens; the others are ignored or another token.
    kinds = data.draw(st.lists(st.sampled_from([None, None, IGNORE_INDEX, 7]), min_size=len(ids), max_size=len(ids)))
    labels = [token if kind is None else kind for token, kind in zip(ids, kinds, strict=True)]
    columns = {"input_ids": ids, "labels": labels, "seq_lengths": [len(document) for document in drawn]}
    plain, inputs = (collate_shared(columns, pad_to=multiple, shared=shared) for shared in (False, True))
    batch, whole = inputs["packed_batch"], plain["packed_batch"]
    if batch.documents is None:
        assert batch.seq_lengths == whole.seq_lengths
        return
    total = whole.loss_positions.numel()
    assert counted(inputs) == counted(plain)
    assert batch.documents.loss_tokens == total
    assert batch.documents.lengths == whole.seq_lengths
    assert batch.documents.capacity == whole.total_tokens
    assert torch.equal(
        batch.documents.copies.int(), batch.documents.token_of.bincount(minlength=batch.total_tokens).int()
    )
    assert torch.equal(inputs["labels"], plain["labels"][:, : len(ids)]), "stock counts its items in them"
    assert batch.total_tokens % (multiple or 1) == 0
    again = unshared(inputs)
    for name in ("input_ids", "position_ids"):
        assert torch.equal(again[name], plain[name][:, : len(ids)]), name
    merged = merge_batches([batch, whole, batch])
    assert merged.documents.loss_tokens == 3 * total
    assert [part.counted or part.loss_tokens for part in merged.parts] == [total] * 3
    assert [part.capacity for part in merged.parts] == [whole.total_tokens] * 3
    shared = inputs["input_ids"][0, : sum(batch.seq_lengths)]
    row = torch.cat([shared, torch.tensor(ids), shared])
    assert row[merged.documents.token_of].tolist() == ids * 3


def test_short_prefixes_are_not_shared() -> None:
    ids = np.concatenate([np.r_[np.arange(15), 90], np.r_[np.arange(15), 91]])
    assert share(ids, [16, 16]) is None
    assert share(ids, [16, 16], least=15) is not None
    assert share(ids, [32]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(trees(), st.integers(0, 3)), min_size=1, max_size=3))
@example([(([1, 1], [-1, 0]), 3)])  # padding longer than any document
def test_merged_rows_have_the_keys_of_one_row(rows: list[tuple[tuple[list[int], list[int]], int]]) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    batches, lengths, parents = [], [], []
    for (own, up), padding in rows:
        batches.append(replace(tree_row(own, up, num_padding=padding), loss_positions=nothing, loss_labels=nothing))
        parents += [parent + len(lengths) * (parent >= 0) for parent in up]
        lengths += own
    merged, expected = merge_batches(batches), tree_row(lengths, parents)
    assert merged.seq_lengths == expected.seq_lengths
    assert torch.equal(merged.position_ids, expected.position_ids)
    for position in range(sum(lengths)):
        assert seen_by(merged, position) == seen_by(expected, position)
    assert (merged.shared is None) == (expected.shared is None)
    if merged.shared is not None and expected.shared is not None:
        assert torch.equal(merged.shared.cu_seqlens_k, expected.shared.cu_seqlens_k)
        assert merged.shared.prefix_lengths == expected.shared.prefix_lengths
        assert merged.shared.max_seqlen_k == expected.shared.max_seqlen_k
