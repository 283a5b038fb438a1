"""Shared prefixes on the host: documents, and what the loss counts of them, are those of the plain row."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, chain, combinations, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_material import build, make_dataset

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.share_prefixes import computed_share
from fastpack_trl.packing.collator import PackingCollator, unshared
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, merge_batches
from fastpack_trl.packing.prefix_order import pack_by_prefix
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


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(3, 12), st.booleans())
def test_rows_by_prefix_have_every_document_once(drawn: list[list[int]], most: int, split: bool) -> None:
    given_rows = {"input_ids": [*drawn, []], "labels": [[token + 1 for token in document] for document in [*drawn, []]]}
    features = Features({"input_ids": List(Value("int64")), "labels": List(Value("int64"))})
    packed = pack_by_prefix(Dataset.from_dict(given_rows, features=features), most, split=split)
    found = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= most
        assert row["labels"] == [token + 1 for token in row["input_ids"]]
        ends = [0, *accumulate(row["seq_lengths"])]
        found += [row["input_ids"][start:end] for start, end in pairwise(ends)]
    pieces = [document[at : at + most] for document in drawn for at in range(0, len(document) if split else 1, most)]
    assert found == sorted(pieces)


def test_documents_that_begin_alike_are_packed_together(tmp_path: Path) -> None:
    """A conversation of six turns, one document per turn with its history: half of the tokens and fewer are left."""
    draw = random.Random(0)
    turns = [[[draw.randrange(5, 95) for _ in range(20)] for _ in range(6)] for _ in range(40)]
    split = [[*chain(*talk[: turn + 1])] for talk in turns for turn in range(6)]
    draw.shuffle(split)
    shares = {}
    for order in ("stock", "prefix"):
        trainer = build(
            FastSFTTrainer, tmp_path, data=Dataset.from_dict({"input_ids": split}), fast={"packing_order": order},
            packing=True, max_length=420, per_device_train_batch_size=1, eval_strategy="no",
        )  # fmt: skip
        tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
        assert tokens == sum(map(len, split))
        shares[order] = computed_share(trainer)
    assert shares["stock"] > 0.8
    assert shares["prefix"] < 0.5


@pytest.mark.parametrize("options", [{"packing": False}, {"packing": True, "packing_strategy": "wrapped"}])
def test_an_order_without_documents_to_pack_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packing_order='prefix': it packs documents"):
        build(FastSFTTrainer, tmp_path, fast={"packing_order": "prefix"}, **options)


def test_a_stream_cannot_be_sorted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no stream"):
        build(
            FastSFTTrainer, tmp_path, data=make_dataset("ids").to_iterable_dataset(), packing=True, eval_strategy="no",
            fast={"packing_order": "prefix"},
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["conversational", "prompt_completion", "ids"])
def test_rows_by_prefix_have_the_documents_of_stock(kind: str, tmp_path: Path) -> None:
    """Whatever else the data set has in lists: the messages of a conversation, columns of the user's."""
    data = make_dataset(kind)
    data = data.add_column("tags", [["a"] * 3] * len(data))
    found = []
    for order in ("prefix", "stock"):
        options = {"packing": True, "eval_strategy": "no", "assistant_only_loss": kind == "conversational"}
        rows = build(FastSFTTrainer, tmp_path, data=data, fast={"packing_order": order}, **options).train_dataset
        assert rows.column_names == ["input_ids", "labels", "seq_lengths"]
        ends = [[0, *accumulate(row["seq_lengths"])] for row in rows]
        found.append(
            sorted(
                (row["input_ids"][start:end], row["labels"][start:end])
                for row, bounds in zip(rows, ends, strict=True)
                for start, end in pairwise(bounds)
            )
        )
    assert found[0] == found[1]


def test_an_order_without_a_length_of_rows_is_refused_as_in_stock(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`max_length` can't be `None`"):
        build(FastSFTTrainer, tmp_path, fast={"packing_order": "prefix"}, packing=True, max_length=None)
