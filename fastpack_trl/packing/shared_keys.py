"""`SharedKeys`: the tokens that each segment of a row attends to; `Documents`: what a row that shares stands for.

Both are made once per batch, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    def of(cls, lengths: Ints, prefix_lengths: Ints, index: Ints) -> SharedKeys:
        """Return the keys of segments of `lengths` tokens behind `prefix_lengths`; `index` is `key_index`."""
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
