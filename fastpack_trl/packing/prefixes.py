"""Documents of a row that begin alike: found on the host by their tokens, and laid into the row once.

Sorted, each document shares most with the one before it, so that one comparison of neighbours finds all there is: equal
documents, one that is contained in another, common prefixes, and prefixes of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.packing.packed_inputs import IntArray
from fastpack_trl.packing.shared_keys import Ranges

LEAST_SHARED = 16
"""Tokens of a prefix below which each document keeps its own: a segment more costs the kernels as much."""


class SharedRow(NamedTuple):
    """A row in which what documents share lies once.

    Documents ``[1, 2, 3]`` and ``[1, 2, 4, 5]``, sharing 2 tokens: ``lengths=[3, 2]``, ``prefixes=[(), ((0, 2),)]``,
    ``first_positions=[0, 2]``, ``token_of=[0, 1, 2, 0, 1, 3, 4]``: the row is ``[1, 2, 3, 4, 5]``.
    """

    lengths: IntArray
    """(num_segments,) tokens of each segment: what a document has beside what lies in the row already."""
    prefixes: tuple[Ranges, ...]
    """See `SharedKeys`."""
    first_positions: IntArray
    """(num_segments,) position of the first token of each segment in its document."""
    token_of: IntArray
    """(document_tokens,) the token of the row of each token of the documents, one after the other as they came."""
    first_of: IntArray
    """(row_tokens,) the first of the documents' tokens that each token of the row is."""


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
    order, common = _neighbours(ids, starts, sizes)
    common[common < least] = 0
    if not common.any():
        return None
    own = sizes[order] - common
    segments_end = own.cumsum()
    token_of: IntArray = np.empty(int(ends[-1]), np.int64)
    paths: list[Ranges] = []
    prefixes: list[Ranges] = []
    for place, (document, kept, added, end) in enumerate(
        zip(order.tolist(), common.tolist(), own.tolist(), segments_end.tolist(), strict=True)
    ):
        first, shared = int(starts[document]), cut(paths[-1], kept) if kept else ()
        if kept:
            before = int(starts[order[place - 1]])
            token_of[first : first + kept] = token_of[before : before + kept]
        token_of[first + kept : first + kept + added] = np.arange(end - added, end)
        if added:
            prefixes.append(shared)
        paths.append(_followed(shared, end - added, end))
    has_own = own > 0
    first_of: IntArray = np.empty(int(segments_end[-1]), np.int64)
    first_of[token_of[::-1]] = np.arange(len(token_of))[::-1]
    return SharedRow(own[has_own], tuple(prefixes), common[has_own], token_of, first_of)


def _neighbours(ids: NDArray[Any], starts: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Return documents in the order of their tokens, and what each shares with the one before it, in tokens."""
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


def cut(ranges: Ranges, tokens: int) -> Ranges:
    """Return the first `tokens` tokens of ranges that have as many."""
    kept: list[tuple[int, int]] = []
    for first, end in ranges:
        kept.append((first, min(end, first + tokens)))
        tokens -= kept[-1][1] - first
        if not tokens:
            break
    return tuple(kept)


def _followed(ranges: Ranges, first: int, end: int) -> Ranges:
    if first == end:
        return ranges
    if ranges and ranges[-1][1] == first:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (first, end))


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
    counted = (labels[1:] != IGNORE_INDEX).nonzero()[0] + 1
    tokens, before = row.token_of[counted], row.token_of[counted - 1]
    # A token of the row follows one other: its copies with the same label are one position.
    usual = labels[counted] == ids[counted]
    weights = np.bincount(tokens[usual], minlength=len(row.first_of))
    targets = weights.nonzero()[0]
    first = row.first_of[targets]
    positions, others = row.token_of[first - 1], ~usual
    return Scored(
        np.concatenate([positions, before[others]]),
        np.concatenate([ids[first], labels[counted[others]]], dtype=np.int64, casting="same_kind"),
        np.concatenate([weights[targets], np.ones(int(others.sum()))]).astype(np.float32),
    )
