"""Shared prefixes on the host: documents, and what the loss counts of them, are those of the plain row."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain, combinations, pairwise, takewhile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.packing.collator import PackingCollator, unshared
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, merge_batches
from fastpack_trl.packing.prefixes import share
from fastpack_trl.packing.shared_keys import SharedKeys

documents = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=7)
"""Of three kinds of token: many are equal, contained in others, or begin alike."""


def labelled(drawn: list[list[int]], data: st.DataObject) -> list[list[int]]:
    """Some labels are ignored, some are other tokens than the next."""
    kinds = st.sampled_from(["own", "own", "ignored", "other"])
    return [
        [{"own": token, "ignored": IGNORE_INDEX, "other": 7}[data.draw(kinds)] for token in document]
        for document in drawn
    ]


def keys_before(keys: SharedKeys, segment: int) -> list[int]:
    first = int(keys.cu_seqlens_k[segment])
    return keys.key_index[first : first + keys.prefix_lengths[segment]].tolist()


def alike(first: list[int], second: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(1, 3))
def test_the_row_has_every_document_and_nothing_twice(drawn: list[list[int]], least: int) -> None:
    ids = np.concatenate([np.array(document) for document in drawn])
    row = share(ids, [len(document) for document in drawn], least)
    if row is None:
        assert all(alike(*pair) < least for pair in combinations(drawn, 2))
        return
    in_row = ids[row.source_of]
    assert row.token_of[row.source_of].tolist() == list(range(len(in_row)))
    assert in_row[row.token_of].tolist() == ids.tolist()
    starts = [0, *accumulate(map(len, drawn))]
    paths = [row.token_of[start:end].tolist() for start, end in pairwise(starts)]
    ends, before = row.lengths.cumsum(), 0
    for end, own, position in zip(ends, row.lengths, row.first_positions, strict=True):
        path = row.key_index[before : before + position + own].tolist()
        before += len(path)
        assert path[position:] == list(range(end - own, end))
        assert path in paths, "a segment ends with a document"
    assert before == len(row.key_index)
    if least == 1:
        # As few tokens as a tree of the documents has nodes.
        assert len(in_row) == len(
            {tuple(document[: place + 1]) for document in drawn for place in range(len(document))}
        )


@settings(max_examples=150, deadline=None)
@given(documents, st.sampled_from([None, 8]), st.data())
def test_a_collated_row_counts_what_the_plain_row_counts(
    drawn: list[list[int]], multiple: int | None, data: st.DataObject
) -> None:
    labels = labelled(drawn, data)
    columns = {"input_ids": [*chain(*drawn)], "labels": [*chain(*labels)]}
    rows = [{**columns, "seq_lengths": [len(document) for document in drawn]}]
    plain = PackingCollator(pad_token_id=9, pad_to_multiple_of=multiple)(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastpack_trl.packing.collator.share", lambda ids, lengths: share(ids, lengths, 1))
        inputs = PackingCollator(pad_token_id=9, pad_to_multiple_of=multiple, share_prefixes=True)(rows)
    batch, whole = inputs["packed_batch"], plain["packed_batch"]
    if batch.documents is None:
        assert batch.seq_lengths == whole.seq_lengths
        return
    assert batch.documents.lengths == whole.seq_lengths
    assert batch.documents.capacity == whole.total_tokens
    tokens = sum(whole.seq_lengths)
    assert torch.equal(inputs["labels"], plain["labels"][:, :tokens]), "stock counts its items in them"
    assert batch.total_tokens % (multiple or 1) == 0
    # Each counted token with what is before it, as often as in the plain row.
    found: Counter[tuple[int, ...]] = Counter()
    ids, keys = inputs["input_ids"][0], batch.shared
    ends = batch.cu_seqlens.tolist()
    for position, label, weight in zip(
        batch.loss_positions.tolist(), batch.loss_labels.tolist(), batch.documents.loss_weights.tolist(), strict=True
    ):
        segment = int(batch.seq_idx[0, position])
        prefix = keys_before(keys, segment) if keys else []
        seen = ids[prefix + list(range(ends[segment], position + 1))].tolist()
        assert int(batch.position_ids[0, position]) == len(seen) - 1
        found[(*seen, label)] += int(weight)
    expected: Counter[tuple[int, ...]] = Counter()
    for position, label in zip(whole.loss_positions.tolist(), whole.loss_labels.tolist(), strict=True):
        first = position - int(whole.position_ids[0, position])
        expected[(*plain["input_ids"][0, first : position + 1].tolist(), label)] += 1
    assert found == expected
    assert batch.documents.loss_tokens == sum(expected.values())
    copies = batch.documents.copies
    assert copies.tolist() == [int(n) for n in batch.documents.token_of.bincount(minlength=batch.total_tokens)]
    again = unshared(inputs)
    assert torch.equal(again["input_ids"], plain["input_ids"][:, :tokens])
    assert torch.equal(again["position_ids"], plain["position_ids"][:, :tokens])
    merged = merge_batches([batch, whole, batch])
    assert merged.documents is not None
    assert merged.documents.loss_tokens == 3 * sum(expected.values())
    assert [part.counted or part.loss_tokens for part in merged.parts] == [sum(expected.values())] * 3
    assert [part.capacity for part in merged.parts] == [whole.total_tokens] * 3
    row = torch.cat([ids[: sum(batch.seq_lengths)], plain["input_ids"][0, :tokens], ids[: sum(batch.seq_lengths)]])
    assert torch.equal(row[merged.documents.token_of], plain["input_ids"][0, :tokens].repeat(3))


def test_short_prefixes_are_not_shared() -> None:
    ids = np.concatenate([np.r_[np.arange(15), 90], np.r_[np.arange(15), 91]])
    assert share(ids, [16, 16]) is None
    assert share(ids, [16, 16], least=15) is not None
    assert share(ids, [32]) is None
