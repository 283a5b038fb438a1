"""Documents of a row that begin alike: found on the host by their tokens, and laid into the row once.

Sorted, each document shares most with the one before it, so that one comparison of neighbours finds all there is: equal
documents, one that is contained in another, common prefixes, and prefixes of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, TensorVersion
from fastpack_trl.packing.packed_inputs import IntArray
from fastpack_trl.packing.shared_keys import SharedKeys

LEAST_SHARED = 16
"""Tokens of a prefix below which each document keeps its own: a segment more costs the kernels as much."""
_FACTORS: IntArray = np.random.default_rng(0).integers(-(2**62), 2**62, LEAST_SHARED) | 1
"""By which first tokens are hashed."""


class SharedRow(NamedTuple):
    """A row in which what documents share lies once.

    Documents ``[1, 2, 3]`` and ``[1, 2, 4, 5]``, sharing 2 tokens: ``lengths=[3, 2]``, ``first_positions=[0, 2]``,
    ``key_index=[0, 1, 2, 0, 1, 3, 4]``, ``token_of=[0, 1, 2, 0, 1, 3, 4]``: the row is ``[1, 2, 3, 4, 5]``.
    """

    lengths: IntArray
    """(num_segments,) tokens of each segment: what a document has beside what lies in the row already."""
    first_positions: IntArray
    """(num_segments,) position of the first token of each segment in its document: the tokens of its prefix."""
    key_index: IntArray
    """(total_keys,) the tokens of the row that each segment attends to: its document, from the first to the last."""
    token_of: IntArray
    """(document_tokens,) the token of the row of each token of the documents, one after the other as they came."""
    source_of: IntArray
    """(row_tokens,) one of the documents' tokens that each token of the row is."""


def share(ids: NDArray[Any], lengths: Sequence[int] | IntArray, least: int = LEAST_SHARED) -> SharedRow | None:
    """Return the row of documents that share at least `least` tokens with another; None where none do.

    Args:
        ids: (document_tokens,) integers below 2^31.
        lengths: tokens of each document, at least 1.
        least: tokens.
    """
    sizes: IntArray = np.asarray(lengths, dtype=np.int64)
    if len(sizes) < 2:
        return None
    ends = sizes.cumsum()
    starts = ends - sizes
    alike = _with_company(ids, starts, sizes, least)
    order, common = neighbours(ids, starts[alike], sizes[alike])
    common[common < least] = 0
    if not common.any():
        return None
    alone: NDArray[np.bool_] = np.ones(len(sizes), np.bool_)
    alone[alike] = False
    order, common = np.append(alike[order], alone.nonzero()[0]), np.append(common, np.zeros(alone.sum(), np.int64))
    starts, sizes = starts[order], sizes[order]
    own = sizes - common
    own_ends = own.cumsum()
    row = np.arange(int(own_ends[-1]))
    token_of: IntArray = np.empty(int(ends[-1]), np.int64)
    path: IntArray = np.empty(int(sizes.max()), np.int64)  # of the present document, token by token
    keys: list[IntArray] = []
    # Two copies per document, and nothing else: this loop runs in the data loader's worker.
    for first, size, kept, end in zip(starts.tolist(), sizes.tolist(), common.tolist(), own_ends.tolist(), strict=True):
        path[kept:size] = row[end - size + kept : end]
        document = token_of[first : first + size]
        document[:] = path[:size]
        if kept < size:
            keys.append(document)
    has_own = own > 0
    source_of = row + (starts + common - (own_ends - own)).repeat(own)
    return SharedRow(own[has_own], common[has_own], np.concatenate(keys), token_of, source_of)


def packed_batch(row: SharedRow, *, num_padding: int = 0) -> PackedBatch:
    """Return the metadata of a row and `num_padding` tokens behind it, on the host."""
    batch = PackedBatch.from_lengths(row.lengths.tolist(), num_padding=num_padding)
    if not row.first_positions.any():
        return batch
    tail: IntArray = np.array([num_padding][:num_padding], dtype=np.int64)
    lengths: IntArray = np.append(row.lengths, tail)
    first: IntArray = np.append(row.first_positions, 0 * tail)
    keys: IntArray = np.append(row.key_index, len(row.source_of) + np.arange(num_padding))
    position_ids = batch.position_ids + torch.from_numpy(first.repeat(lengths))
    shared = SharedKeys.of(lengths, first, keys)
    return replace(batch, position_ids=position_ids, positions=TensorVersion.of(position_ids), shared=shared)


def _with_company(ids: NDArray[Any], starts: IntArray, sizes: IntArray, least: int) -> IntArray:
    """Return the documents whose first tokens another one has too, and by chance others: the rest need no sorting."""
    enough, hashes = first_hashes(ids, starts, sizes, least)
    _, which, count = np.unique(hashes, return_inverse=True, return_counts=True)
    return enough[count[which] > 1]


def first_hashes(ids: NDArray[Any], starts: IntArray, sizes: IntArray, least: int) -> tuple[IntArray, IntArray]:
    """Return the documents of at least `least` tokens, and a hash of the first tokens of each."""
    least = min(least, len(_FACTORS))
    enough = (sizes >= least).nonzero()[0]
    return enough, ids[starts[enough, None] + np.arange(least)].astype(np.int64) @ _FACTORS[:least]


def neighbours(ids: NDArray[Any], starts: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Return documents in the order of their tokens, and what each shares with the one before it, in tokens."""
    if not len(starts):
        return starts, starts
    # Big-endian bytes compare as the numbers do.
    text = ids.astype(">u4").tobytes()
    pieces = [text[4 * start : 4 * (start + size)] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    order: IntArray = np.array(sorted(range(len(pieces)), key=pieces.__getitem__), dtype=np.int64)
    compared = np.minimum(sizes[order[1:]], sizes[order[:-1]])
    offsets = compared.cumsum() - compared
    within = np.arange(int(compared.sum())) - offsets.repeat(compared)
    unlike = ids[within + starts[order[1:]].repeat(compared)] != ids[within + starts[order[:-1]].repeat(compared)]
    # The first difference of each pair; its length where there is none.
    first = np.minimum.reduceat(np.where(unlike, within, len(ids)), offsets)
    common: IntArray = np.append(0, np.minimum(first, compared))
    return order, common


class Scored(NamedTuple):
    """What the loss counts of a `SharedRow`."""

    positions: IntArray
    """(num_positions,) tokens of the row whose next token is counted; once for each way in which documents go on."""
    labels: IntArray
    """(num_positions,) those next tokens."""
    weights: NDArray[np.float32]
    """(num_positions,) how many documents count each."""


def score(row: SharedRow, ids: NDArray[Any], labels: NDArray[Any]) -> Scored:
    """Return the positions with a loss in the documents of `row`, those that are the same once.

    Args:
        row: of these documents.
        ids: (document_tokens,).
        labels: (document_tokens,), `IGNORE_INDEX` where no loss is counted and at the first token of each document.
    """
    counted = labels != IGNORE_INDEX
    # A token of the row follows one other: its copies with the same label are one position.
    others = (counted & (labels != ids)).nonzero()[0]
    counted[others] = False
    weights = np.bincount(row.token_of, counted, len(row.source_of))
    targets = weights.nonzero()[0]
    source = row.source_of[targets]
    found = row.token_of[source - 1], ids[source], weights[targets]
    if len(others):  # labels that are not the tokens count by themselves
        more = row.token_of[others - 1], labels[others], np.ones(len(others))
        found = tuple(map(np.concatenate, zip(found, more, strict=True)))
    positions, next_tokens, counts = found
    return Scored(positions, next_tokens.astype(np.int64, copy=False), counts.astype(np.float32))
