"""`SharedKeys`: the tokens that each segment of a row attends to; `Documents`: what a row that shares stands for.

Both are made once per batch, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Tokens of a row, first and end of each run: ``((0, 2), (5, 9))``."""


Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeys:
    """The keys of segments that go on from tokens which lie elsewhere in the row.

    Segments of 4 and 1 tokens, of which the second goes on from the first two tokens of the first:
    ``prefix_lengths=(0, 2)``, ``key_index=[0, 1, 2, 3, 0, 1, 4]``, ``cu_seqlens_k=[0, 4, 7]``, ``max_seqlen_k=4``.

    Query ``i`` of a segment is ``len(keys) - len(segment) + i``-th of its keys, so causality is aligned bottom-right,
    and distances between queries and keys are those of the documents.

    Attributes:
        prefix_lengths: on the host, for each segment of `PackedBatch.cu_seqlens` the keys before its own tokens.
        key_index: (total_keys,) int64, the tokens of each segment's keys: its prefix, then its own.
        cu_seqlens_k: (num_segments + 1,) int32, in keys.
        max_seqlen_k: keys of the segment that has most, a host int.
    """

    prefix_lengths: tuple[int, ...]
    key_index: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[Ranges]) -> SharedKeys:
        """Return the keys of segments of these lengths, one after the other in the row, with these prefixes."""
        ends = np.cumsum(lengths)
        runs = [
            run
            for end, length, prefix in zip(ends.tolist(), lengths, prefixes, strict=True)
            for run in (*prefix, (end - length, end))
        ]
        # Of each run its first token, less the keys before it: added to a count of all keys, that is the token.
        bounds: NDArray[np.int64] = np.array(runs, dtype=np.int64)
        sizes = bounds[:, 1] - bounds[:, 0]
        before = sizes.cumsum() - sizes
        index = np.arange(sizes.sum()) + (bounds[:, 0] - before).repeat(sizes)
        last_run = np.cumsum([len(prefix) + 1 for prefix in prefixes]) - 1
        cu_seqlens_k: NDArray[np.int64] = np.append(0, (before + sizes)[last_run])
        return cls(
            prefix_lengths=tuple(sum(end - first for first, end in ranges) for ranges in prefixes),
            key_index=torch.from_numpy(index),
            cu_seqlens_k=torch.from_numpy(cu_seqlens_k.astype(np.int32)),
            max_seqlen_k=int(np.diff(cu_seqlens_k).max()),
        )

    @classmethod
    def found(cls, lengths: Ints, prefix_lengths: Ints, index: Ints) -> SharedKeys:
        """Return the keys of segments whose tokens are known already."""
        keys = lengths + prefix_lengths
        ends: NDArray[np.int32] = np.append(0, keys.cumsum()).astype(np.int32)
        return cls(tuple(prefix_lengths.tolist()), torch.from_numpy(index), torch.from_numpy(ends), int(keys.max()))

    @classmethod
    def own(cls, cu_seqlens: Tensor, lengths: Sequence[int]) -> SharedKeys:
        """Return the keys of segments without a prefix, on the device of their `cu_seqlens`."""
        index = torch.arange(sum(lengths), device=cu_seqlens.device)
        return cls((0,) * len(lengths), index, cu_seqlens, max(lengths))

    def without_tail(self, num_padding: int) -> SharedKeys:
        """Return the keys without those of the padding, which is the last segment of a row and has no prefix."""
        if not num_padding:
            return self
        return replace(
            self, prefix_lengths=self.prefix_lengths[:-1], key_index=self.key_index[:-num_padding],
            cu_seqlens_k=self.cu_seqlens_k[:-1],
        )  # fmt: skip

    def map(self, convert: Callable[[Tensor], Tensor]) -> SharedKeys:
        """Return a copy whose tensors are what `convert` makes of them."""
        return replace(self, key_index=convert(self.key_index), cu_seqlens_k=convert(self.cu_seqlens_k))


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents that a row with shared prefixes stands for, one after the other as without sharing.

    Documents of 3 and 4 tokens that share 2: ``token_of=[0, 1, 2, 0, 1, 3, 4]``.

    Attributes:
        lengths: tokens of each document, on the host.
        token_of: (document_tokens,) int64, the token of the row of each token of theirs.
        loss_weights: (num_loss_positions,) fp32, how many documents count each of `PackedBatch.loss_positions`.
        copies: (row_tokens,) fp32, how many documents have each token of the row; 0 for padding.
        loss_tokens: their sum, on the host.
        capacity: tokens of the row that it would be without sharing, padding included.
        parts: document tokens of each part of a merged row; empty for a row by itself.
    """

    lengths: tuple[int, ...]
    token_of: Tensor
    loss_weights: Tensor
    copies: Tensor
    loss_tokens: int
    capacity: int
    parts: tuple[int, ...] = ()

    @classmethod
    def own(cls, lengths: Sequence[int], loss_positions: Tensor, capacity: int) -> Documents:
        """Return those of a row in which nothing is shared, on its device."""
        token_of = torch.arange(sum(lengths), device=loss_positions.device)
        weights, copies = (token_of.new_ones(n, dtype=torch.float32) for n in (loss_positions.numel(), len(token_of)))
        return cls(tuple(lengths), token_of, weights, copies, loss_positions.numel(), capacity)

    def map(self, convert: Callable[[Tensor], Tensor]) -> Documents:
        """Return a copy whose tensors are what `convert` makes of them."""
        tensors = {name: convert(getattr(self, name)) for name in ("token_of", "loss_weights", "copies")}
        return replace(self, **tensors)


class Tree(NamedTuple):
    """Pieces of a row that go on from each other, as segments of queries."""

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    first_positions: tuple[int, ...]
    """Position of the first token of each segment in its document."""
    prefixes: tuple[Ranges, ...]
    """Tokens of the row before its own that each segment attends to, in the order of the document."""


def join_pieces(lengths: Sequence[int], parents: Sequence[int]) -> Tree:
    """Return the segments of pieces that lie one after the other in a row.

    A piece right behind its parent goes on in the same segment, as in any document: lengths ``(2, 2, 1)`` and parents
    ``(-1, 0, 0)`` are segments of 4 and 1 tokens, of which the second has the prefix ``((0, 2),)``.

    Args:
        lengths: tokens of each piece, at least 1.
        parents: the piece before it whose last token precedes its first one; -1: a document begins.

    Raises:
        ValueError: lists of different lengths, a length below 1, a parent that is not an earlier piece.
    """
    if len(lengths) != len(parents):
        raise ValueError(f"{len(parents)} parents for {len(lengths)} segments: give one each, -1 for a new document")
    ends: list[int] = []
    positions: list[int] = []  # of the first token of each piece
    seen: list[Ranges] = []  # what each piece attends to before its own tokens
    segments: list[int] = []
    heads: list[int] = []  # first piece of each segment
    start = 0
    for piece, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if length < 1:
            raise ValueError(f"segment {piece} has length {length}: leave out what has no token of its own")
        if not -1 <= parent < piece:
            raise ValueError(f"segment {piece} has the parent {parent}: give an earlier segment, or -1 for none")
        if parent < 0:
            positions.append(0)
            seen.append(())
        else:
            positions.append(positions[parent] + lengths[parent])
            seen.append(_followed(seen[parent], (ends[parent] - lengths[parent], ends[parent])))
        if parent == piece - 1 and piece:
            segments[-1] += length
        else:
            segments.append(length)
            heads.append(piece)
        start += length
        ends.append(start)
    return Tree(tuple(segments), tuple(positions[head] for head in heads), tuple(seen[head] for head in heads))


def _followed(ranges: Ranges, last: tuple[int, int]) -> Ranges:
    """Return `ranges` and one more; one run where they touch."""
    if ranges and ranges[-1][1] == last[0]:
        return (*ranges[:-1], (ranges[-1][0], last[1]))
    return (*ranges, last)


def merge_keys(rows: Sequence[SharedKeys], tokens: Sequence[int]) -> SharedKeys:
    """Return the keys of rows that are laid one after the other, on their device; `tokens` are their lengths."""
    index: list[Tensor] = []
    ends = [rows[0].cu_seqlens_k[:1]]
    start = keys = 0
    for row, count in zip(rows, tokens, strict=True):
        index.append(row.key_index + start)
        ends.append(row.cu_seqlens_k[1:] + keys)
        start, keys = start + count, keys + row.key_index.numel()
    prefixes = tuple(length for row in rows for length in row.prefix_lengths)
    return SharedKeys(prefixes, torch.cat(index), torch.cat(ends), max(row.max_seqlen_k for row in rows))


def merge_documents(rows: Sequence[Documents], tokens: Sequence[int]) -> Documents:
    """Return the documents of rows that are laid one after the other, on their device; `tokens` are their lengths."""
    starts = [sum(tokens[:place]) for place in range(len(tokens))]
    return Documents(
        lengths=tuple(length for row in rows for length in row.lengths),
        token_of=torch.cat([row.token_of + start for row, start in zip(rows, starts, strict=True)]),
        loss_weights=torch.cat([row.loss_weights for row in rows]),
        copies=torch.cat([row.copies[:count] for row, count in zip(rows, tokens, strict=True)]),
        loss_tokens=sum(row.loss_tokens for row in rows),
        capacity=sum(row.capacity for row in rows),
        parts=tuple(sum(row.lengths) for row in rows),
    )
