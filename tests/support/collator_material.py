"""Rows, batches and comparisons that the tests of the collator share."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import strategies as st

from fastpack_trl.packing.packed_batch import PackedBatch

BATCH_TENSORS = ("cu_seqlens", "position_ids", "seq_idx", "loss_positions", "loss_labels")
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 8, 9], "seq_lengths": [3, 2]},
    {"input_ids": [11, 12, 13], "labels": [11, 12, 13], "seq_lengths": [3]},
]


def parts_of(batch):
    """Return what a batch holds, by name."""
    names = (*BATCH_TENSORS, "seq_lengths", "num_padding", "max_seqlen")
    assert all(type(length) is int for length in batch.seq_lengths)
    found = {name: getattr(batch, name) for name in names}
    for name in ("shared", "documents"):
        part = getattr(batch, name)
        found |= {name: None} if part is None else {f"{name}.{f.name}": getattr(part, f.name) for f in fields(part)}
    return found


def tensors_of(inputs):
    values = inputs | parts_of(inputs["packed_batch"])
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def assert_same_inputs(ours, reference):
    assert list(ours) == list(reference)
    for name, value in reference.items():
        mine = ours[name]
        if isinstance(value, PackedBatch):
            assert_same_inputs(parts_of(mine), parts_of(value))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(mine, value), name
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape), name
        else:
            assert (mine, type(mine)) == (value, type(value)), name


@st.composite
def batches(draw, min_length=1):
    """Rows of one batch: packed or not, with labels or not; no row without a token."""
    packed, labelled = draw(st.booleans()), draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(min_length, 9), min_size=1, max_size=6))
        lengths = lengths if sum(lengths) else [1]
        ids = draw(st.lists(st.integers(0, 95), min_size=sum(lengths), max_size=sum(lengths)))
        row = {"input_ids": ids}
        if packed:
            row["seq_lengths"] = lengths
        if labelled:
            ignored = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            row["labels"] = [-100 if skip else token for token, skip in zip(ids, ignored, strict=True)]
        rows.append(row)
    return rows
