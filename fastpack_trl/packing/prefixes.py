"""Find common prefixes of documents on the host, by their tokens, and store each once in the row.

Sorted, each document shares most with the one before it, so that one comparison of neighbours finds all there is: equal
documents, one that is contained in another, common prefixes, and prefixes of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.packing.shared_keys import Ints

LEAST_SHARED = 16
"""Tokens of a prefix below which each document keeps its own: a segment more costs the kernels as much."""


class SharedRow(NamedTuple):
    """A row that stores shared prefixes once.

    Documents ``[1, 2, 3]`` and ``[1, 2, 4, 5]``, sharing 2 tokens: ``lengths=[3, 2]``, ``first_positions=[0, 2]``,
    ``key_index=[0, 1, 2, 0, 1, 3, 4]``, ``token_of=[0, 1, 2, 0, 1, 3, 4]``: the row is ``[1, 2, 3, 4, 5]``.
    """

    lengths: Ints
    """(num_segments,) tokens of each segment: those of a document that are not in the row yet."""
    first_positions: Ints
    """(num_segments,) position of the first token of each segment in its document: the tokens of its prefix."""
    key_index: Ints
    """(total_keys,) the tokens of the row that each segment attends to: its document, from the first to the last."""
    token_of: Ints
    """(document_tokens,) the token of the row of each token of the documents, one after the other as they came."""
    source_of: Ints
    """(row_tokens,) one of the documents' tokens that each token of the row is."""


def share(ids: NDArray[Any], lengths: Sequence[int] | Ints, least: int = LEAST_SHARED) -> SharedRow | None:
    """Return the row of documents that share at least `least` tokens with another; None if none do.

    `ids` are (document_tokens,) integers below 2^31, `lengths` the tokens of each document, at least 1.
    """
    sizes: Ints = np.asarray(lengths, dtype=np.int64)
    ends = sizes.cumsum()
    starts = ends - sizes
    order, common = _neighbours(ids, starts, sizes)
    common[common < least] = 0
    if not common.any():
        return None
    # Documents that share nothing come last, in the order in which they came.
    sharing = (common > 0) | (np.append(common[1:], 0) > 0)
    order = np.append(order[sharing], np.sort(order[~sharing]))
    common = np.append(common[sharing], common[~sharing])
    starts, sizes = starts[order], sizes[order]
    own = sizes - common
    own_ends = own.cumsum()
    row = np.arange(int(own_ends[-1]))
    token_of: Ints = np.empty(int(ends[-1]), np.int64)
    path: Ints = np.empty(int(sizes.max()), np.int64)  # of the present document, token by token
    keys: list[Ints] = []
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


def _neighbours(ids: NDArray[Any], starts: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return documents in the order of their tokens, and how many tokens each shares with the one before it."""
    text = ids.astype(">u4").tobytes()  # big-endian bytes compare as the numbers do
    spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    pieces = [text[4 * start : 4 * end] for start, end in spans]
    order = sorted(range(len(pieces)), key=pieces.__getitem__)
    common: Ints = np.zeros(len(order), np.int64)
    for place, (before, after) in enumerate(pairwise(ids[slice(*spans[document])] for document in order), 1):
        size = min(len(before), len(after))
        unlike = (before[:size] != after[:size]).nonzero()[0]
        common[place] = unlike[0] if len(unlike) else size
    return np.array(order), common


def score(row: SharedRow, ids: NDArray[Any], labels: NDArray[Any]) -> tuple[Ints, Ints, NDArray[np.float32]]:
    """Return the tokens of a row whose next token the loss counts, those next tokens, and how many documents count it.

    A token is listed once for each different next token. `ids` and `labels` are (document_tokens,); labels are
    `IGNORE_INDEX` where no loss is counted and at the first token of each document.
    """
    counted = labels != IGNORE_INDEX
    others = (counted & (labels != ids)).nonzero()[0]  # labels that are not the tokens count by themselves
    counted[others] = False
    # A token of the row follows one other, so its copies with the same label are one position.
    weights = np.bincount(row.token_of, counted, len(row.source_of))
    source: Ints = np.append(row.source_of[weights > 0], others)
    next_tokens: Ints = np.append(ids[row.source_of[weights > 0]], labels[others])
    counts: NDArray[np.float32] = np.append(weights[weights > 0], np.ones(len(others)))
    return row.token_of[source - 1], next_tokens.astype(np.int64), counts.astype(np.float32)
