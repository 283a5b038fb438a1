"""Rows for tests of static batches: as collated, merged, and the buckets that they fit into."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.packing.prefixes import share
from fastpack_trl.packing.static_batch import StaticInputs
from fastpack_trl.step.merging import merge_inputs

VOCABULARY = 96


def make_inputs(
    lengths: list[int], *, seed: int = 0, ignored: float = 0.0, pad_to: int | None = None, shared: bool = False
) -> Any:
    """A micro-batch as the collator makes it, of random tokens, of which a share of labels is ignored.

    `shared`: documents go on alike for a while, from one of two beginnings, and lie in the row once as far as they do.
    """
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, VOCABULARY, sum(lengths))
    if shared:
        alike = [int(draw.integers(0, length + 1)) for length in lengths]
        beginnings = draw.integers(3, VOCABULARY, (2, max(lengths)))
        starts = np.cumsum([0, *lengths])
        for start, count in zip(starts, alike, strict=False):
            ids[start : start + count] = beginnings[draw.integers(2), :count]
    labels = np.where(draw.random(len(ids)) < ignored, IGNORE_INDEX, ids)
    row = {"input_ids": ids, "labels": labels, "seq_lengths": np.array(lengths)}
    return collate_shared(row, pad_to=pad_to, shared=shared)


def collate_shared(row: dict[str, Any], *, pad_to: int | None = None, shared: bool = True) -> Any:
    """Collate one row; with `shared` documents share prefixes from one token on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastpack_trl.packing.collator.share", partial(share, least=1))
        return PackingCollator(pad_token_id=0, pad_to_multiple_of=pad_to, share_prefixes=shared)([row])


def make_rows(parts: list[list[int]], *, device: str = "cpu", **options: Any) -> Any:
    """A micro-batch of one part, or several merged where they run."""
    rows = [make_inputs(lengths, seed=seed, **options).to(device) for seed, lengths in enumerate(parts)]
    return merge_inputs(rows) if len(rows) > 1 else rows[0]


def bucket_for(
    inputs: Any, *, tail: int = 0, segments: int = 0, longer: int = 0, keys: int = 0, keyed: bool = False
) -> Bucket:
    """The smallest bucket of a row, and so much more of each; `keyed`: with keys though nothing is shared."""
    size = Bucket.of(inputs["packed_batch"])
    size, longest = size.with_keys if keyed else size, size.max_seqlen + longer
    bucket = Bucket(size.tokens + tail, size.segments + segments, longest)
    if size.keys:
        keys = size.keys + tail + (keys if tail else 0)
        pieces = max(1, min(tail, -(-tail // longest)))
        most = max(size.max_seqlen_k, -(-(keys - size.keys) // pieces))
        bucket = bucket._replace(keys=keys, max_seqlen_k=most)
    return bucket._replace(segments=bucket.segments + bucket.pieces_of(size))


def to_static(inputs: Any, bucket: Bucket) -> StaticInputs:
    """The static form of a micro-batch in tensors of its own, on the device of its row."""
    static = StaticInputs(bucket, inputs["input_ids"].device)
    static.copy_row(inputs["packed_batch"], inputs["input_ids"])
    return static


documents = st.lists(st.integers(1, 12), min_size=1, max_size=6)
rows = st.builds(
    make_rows, st.lists(documents, min_size=1, max_size=3), pad_to=st.sampled_from([None, 8]), shared=st.booleans()
)
"""Some of those that share have nothing in common after all."""
surplus = st.fixed_dictionaries(
    {"tail": st.integers(0, 30), "segments": st.integers(0, 6), "longer": st.integers(0, 9),
     "keys": st.integers(0, 50), "keyed": st.booleans()}
)  # fmt: skip
