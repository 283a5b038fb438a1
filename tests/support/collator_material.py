"""Rows, batches and comparisons that the tests of the collator share."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack_trl.packing.packed_batch import PackedBatch

BATCH_TENSORS = ("cu_seqlens", "position_ids", "seq_idx", "loss_positions", "loss_labels")
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 8, 9], "seq_lengths": [3, 2]},
    {"input_ids": [11, 12, 13], "labels": [11, 12, 13], "seq_lengths": [3]},
]


class CountCopies(TorchDispatchMode):
    """Counts the operators that copy a tensor to another device."""

    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_to_copy" in str(func) or "copy_" in str(func) or "clone" in str(func):
            self.copies[str(func)] += 1
        return func(*args, **(kwargs or {}))


def tensors_of(inputs):
    batch = inputs["packed_batch"]
    found = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    for part in filter(None, (batch.shared, batch.documents)):
        found |= {field.name: value for field in fields(part) if hasattr(value := getattr(part, field.name), "device")}
    return found | {name: getattr(batch, name) for name in BATCH_TENSORS}


def assert_same_batch(ours, reference):
    for name in BATCH_TENSORS:
        mine, other = getattr(ours, name), getattr(reference, name)
        assert torch.equal(mine, other), name
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape), name
    for name in ("seq_lengths", "num_padding", "max_seqlen"):
        assert getattr(ours, name) == getattr(reference, name), name
    for name in ("shared", "documents"):
        mine, other = getattr(ours, name), getattr(reference, name)
        assert type(mine) is type(other), name
        for field in fields(other) if other is not None else ():
            pair = getattr(mine, field.name), getattr(other, field.name)
            assert torch.equal(*pair) if isinstance(pair[1], torch.Tensor) else pair[0] == pair[1], field.name
    assert all(type(length) is int for length in ours.seq_lengths)


def assert_same_inputs(ours, reference):
    assert list(ours) == list(reference)
    for name, value in reference.items():
        if isinstance(value, PackedBatch):
            assert_same_batch(ours[name], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        else:
            assert ours[name] == value, name
            assert type(ours[name]) is type(value), name


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
