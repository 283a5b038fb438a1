"""Material of the tests of shared prefixes: random trees, and what a token of one sees by a loop over its documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from hypothesis import strategies as st

from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch


@st.composite
def trees(draw: st.DrawFn, most: int = 7, longest: int = 6) -> tuple[list[int], list[int]]:
    """Lengths and parents of a few segments, any depth, several documents that begin anew among them."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return lengths, [draw(st.integers(-1, piece - 1)) for piece in range(len(lengths))]


def path_of(lengths: list[int], parents: list[int], piece: int) -> list[int]:
    """Tokens of the row from the beginning of a document to the end of one of its segments."""
    start = sum(lengths[:piece])
    own = list(range(start, start + lengths[piece]))
    return (path_of(lengths, parents, parents[piece]) if parents[piece] >= 0 else []) + own


def tree_row(lengths: Sequence[int], parents: Sequence[int] | None, *, num_padding: int = 0) -> PackedBatch:
    """The row of segments that go on from the *last* token of an earlier one; -1: a document begins; None: all do."""
    if parents is None:
        return PackedBatch.from_lengths(lengths, num_padding=num_padding)
    pieces = range(len(lengths))
    paths = [path_of(list(lengths), list(parents), piece) for piece in pieces]
    first = np.array([len(path) - length for path, length in zip(paths, lengths, strict=True)])
    return PackedBatch.from_lengths(lengths, num_padding=num_padding, prefixes=(first, np.concatenate(paths)))


def seen_by(batch: PackedBatch, position: int) -> list[int]:
    """Tokens of the row that one of them sees: the prefix of its segment, then the segment up to itself."""
    segment = int(batch.seq_idx[0, position])
    start = int(batch.cu_seqlens[segment])
    if batch.shared is None:
        return list(range(start, position + 1))
    first, count = int(batch.shared.cu_seqlens_k[segment]), batch.shared.prefix_lengths[segment] + position - start + 1
    return batch.shared.key_index[first : first + count].tolist()


def prefixed(*, labels: bool = False, count: int = 60) -> Dataset:
    """Documents that begin with one of two prompts, some of which go on alike; equal ones, and one inside another."""
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(5, 95) for _ in range(number)]

    prompts = [tokens(24), tokens(18)]
    longer = prompts[0] + tokens(17)
    rows = [draw.choice([*prompts, longer]) + tokens(draw.randrange(1, 12)) for _ in range(count)]
    rows[1], rows[3], rows[5] = rows[0], longer, prompts[1]
    columns: dict[str, Any] = {"input_ids": rows}
    if labels:  # a mask that differs from document to document, also within the prompts
        kept = [draw.randrange(0, len(row)) for row in rows]
        columns["labels"] = [
            [IGNORE_INDEX if place < keep else token for place, token in enumerate(row)]
            for row, keep in zip(rows, kept, strict=True)
        ]
    return Dataset.from_dict(columns)


@st.composite
def groups(draw: st.DrawFn) -> list[list[int]]:
    """Documents that begin with one of two prompts, or with a part of one, or with nothing in common."""
    tokens = st.integers(3, 95)
    prompts = [draw(st.lists(tokens, min_size=16, max_size=24)) for _ in range(2)]
    prompts.append(prompts[0] + draw(st.lists(tokens, min_size=1, max_size=20)))
    own = st.lists(tokens, min_size=0, max_size=7)
    return [draw(st.sampled_from([*prompts, []])) + draw(own) or [5] for _ in range(draw(st.integers(2, 6)))]
