"""Rows for tests of static batches: as collated, merged, and the buckets that they fit into."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.packing.static_batch import StaticInputs, copy_into
from fastpack_trl.step.accumulation import merge_inputs

VOCABULARY = 96


def make_inputs(lengths: list[int], *, seed: int = 0, ignored: float = 0.0, pad_to: int | None = None) -> Any:
    """A micro-batch as the collator makes it, of random tokens, of which a share of labels is ignored."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, VOCABULARY, sum(lengths))
    labels = np.where(draw.random(len(ids)) < ignored, IGNORE_INDEX, ids)
    row = {"input_ids": ids, "labels": labels, "seq_lengths": np.array(lengths)}
    return PackingCollator(pad_token_id=0, pad_to_multiple_of=pad_to)([row])


def make_rows(parts: list[list[int]], *, device: str = "cpu", **options: Any) -> Any:
    """A micro-batch of one part, or several merged where they run."""
    rows = [make_inputs(lengths, seed=seed, **options).to(device) for seed, lengths in enumerate(parts)]
    return merge_inputs(rows) if len(rows) > 1 else rows[0]


def bucket_for(
    inputs: Any, *, tail: int = 0, segments: int = 0, longer: int = 0, loss: int = 0, parts: int = 0
) -> Bucket:
    """The smallest bucket of a row, and so much more of each."""
    size = RowSize.of(inputs["packed_batch"])
    longest = size.max_seqlen + longer
    return Bucket(
        tokens=size.tokens + tail,
        segments=size.segments + -(-tail // longest) + segments,
        max_seqlen=longest,
        loss_tokens=size.loss_tokens + loss,
        parts=size.parts + parts,
    )


def to_static(inputs: Any, bucket: Bucket) -> StaticInputs:
    """The static form of a micro-batch in tensors of its own, on the device of its row."""
    static = StaticInputs(bucket, inputs["input_ids"].device)
    copy_into(static, inputs)
    return static


documents = st.lists(st.integers(1, 12), min_size=1, max_size=6)
rows = st.builds(
    make_rows, st.lists(documents, min_size=1, max_size=3), ignored=st.sampled_from([0.0, 0.5, 1.0]),
    pad_to=st.sampled_from([None, 8]),
)  # fmt: skip
surplus = st.fixed_dictionaries(
    {"tail": st.integers(0, 30), "segments": st.integers(0, 6), "longer": st.integers(0, 9), "loss": st.integers(0, 40),
     "parts": st.integers(0, 3)}
)  # fmt: skip
