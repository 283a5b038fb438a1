"""Shapes of static batches: a few buckets, chosen from the sizes of a sample of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length

MOST_BUCKETS = 4
"""Each costs a recording, and an eager row before it."""
_TOKEN_STEPS = (8, 64)
"""Tokens are rounded up to them, below and from `_LONG` on: whole tiles of the matmuls."""
_LONG = 1024
_STEPS = 24
"""Rows are cut at the quantiles of so many equal parts."""
_LEAST_GAIN = 0.02
"""Share of all tokens that one more bucket has to save."""
_LEAST_SHARE = 0.02
"""Share of the rows that a bucket has to serve: a row beyond the ordinary has none."""
_BLOCK_COST = 0.0025
"""Tokens that a surplus token of segments x max_seqlen costs with torch's kernel: blocks that find nothing to do.
0.0023 to 0.0030 in a layer of Qwen3-0.6B's shape on an H200, at 2,048 and 8,192 tokens; half of it in Qwen3-8B's."""
_KEY_COST = 0.03
"""Tokens that a surplus key costs: gathered, added back, and seen by the tail. By its traffic to memory in a layer of
Qwen3-0.6B's shape: some 30 KB, of the 0.3 microseconds that a token takes there on an H200."""


class Bucket(NamedTuple):
    """The shapes of a static batch, and the size of a row: ``Bucket(tokens=2048, segments=16, max_seqlen=640)``."""

    tokens: int
    """Of the row, its padding included."""
    segments: int
    """`cu_seqlens` has one entry more. Surplus segments of a static batch have length 0."""
    max_seqlen: int
    """Tokens of the longest segment; at least, in a static batch."""
    keys: int = 0
    """Entries of `SharedKeys.key_index`; 0: the row holds every document whole."""
    max_seqlen_k: int = 0
    """Keys of the segment that has most; at least, in a static batch."""

    @classmethod
    def of(cls, batch: PackedBatch) -> Bucket:
        """Return the size of a plain batch, or the bucket of a static one."""
        size = cls(batch.total_tokens, batch.cu_seqlens.numel() - 1, batch.max_seqlen)
        if batch.shared is None:
            return size
        return size._replace(keys=batch.shared.key_index.numel(), max_seqlen_k=batch.shared.max_seqlen_k)

    @property
    def with_keys(self) -> Bucket:
        """The size with keys: each token's own if nothing is shared."""
        return self if self.keys else self._replace(keys=self.tokens, max_seqlen_k=self.max_seqlen)

    def pieces_of(self, size: Bucket) -> int:
        """Return the segments of the tail: none has more tokens, or sees more keys, than the bucket's longest."""
        pieces = -(-(self.tokens - size.tokens) // self.max_seqlen)
        return max(pieces, -(-(self.keys - size.with_keys.keys) // self.max_seqlen_k)) if self.keys else pieces

    def holds(self, size: Bucket) -> bool:
        """Return whether a row of this size fits; one without shared tokens fits into a bucket with keys too."""
        tail, pieces = self.tokens - size.tokens, self.pieces_of(size)
        fits = tail >= 0 and size.max_seqlen <= self.max_seqlen and size.segments + pieces <= self.segments
        if not self.keys:
            return fits and not size.keys
        # Every token of the tail is its own key, and every piece of it has a token.
        size = size.with_keys
        return fits and size.max_seqlen_k <= self.max_seqlen_k and pieces <= tail <= self.keys - size.keys


def smallest_fitting(buckets: Iterable[Bucket], size: Bucket) -> Bucket | None:
    """Return the bucket in which a row of this size costs least; None if it fits into none."""
    fitting = (bucket for bucket in buckets if bucket.holds(size))
    return min(fitting, key=lambda bucket: float(_cost(*bucket)), default=None)


def choose_buckets(sizes: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Choose at most `MOST_BUCKETS` buckets for rows of these sizes.

    Rows are ordered by their tokens, or those of about as many tokens by their longest document. The buckets are the
    maxima, rounded up, of the consecutive groups for which padding costs least.
    """
    if any(size.keys for size in sizes):
        sizes = [size.with_keys for size in sizes]
    orders = (sorted(sizes), sorted(sizes, key=lambda size: (rounded_length(size.tokens), *size[2:], *size)))
    _, groups = min((_groups(np.array(rows, dtype=np.int64)) for rows in orders), key=itemgetter(0))
    return tuple({_around(group): None for group in groups if len(group) >= _LEAST_SHARE * len(sizes)})


def _groups(rows: NDArray[np.int64]) -> tuple[float, list[NDArray[np.int64]]]:
    """Return the cost of all rows in their buckets, and the groups into which the (N, 5) ordered rows are cut."""
    count = len(rows)
    # The rare rows beyond the ordinary come last; they may be a group of their own, for which there is no bucket.
    places = sorted({count * step // _STEPS for step in range(_STEPS + 1)} | {count - int(_LEAST_SHARE * count)})
    costs = {(a, b): (b - a) * _cost(*rows[a:b].max(axis=0)) for a, b in combinations(places, 2)}
    best, chosen = math.inf, tuple[int, ...]()
    for cuts in range(MOST_BUCKETS):
        ways = [(0, *inner, count) for inner in combinations(places[1:-1], cuts)]
        cost, way = min(((sum(costs[pair] for pair in pairwise(way)), way) for way in ways), default=(math.inf, ()))
        if cost > best - _LEAST_GAIN * rows[:, 0].sum():
            break
        best, chosen = cost, way
    return best, np.split(rows, chosen[1:-1])


def _cost(tokens: Any, segments: Any, longest: Any, keys: Any, longest_k: Any) -> Any:
    # Forward has blocks of queries, backward of keys: if nothing is shared these are the same.
    blocks = segments * (longest + np.maximum(longest, longest_k)) / 2
    return tokens + _BLOCK_COST * blocks + _KEY_COST * keys


def _around(group: NDArray[np.int64]) -> Bucket:
    """Return the bucket of a group: its maxima, rounded up, with room for the tail of each row."""
    tokens, segments, longest, keys, longest_k = map(int, group.max(axis=0))
    tokens, longest = _rounded(tokens + bool(keys)), rounded_length(longest)  # left-over keys need a tail to see them
    tails = tokens - group[:, 0]
    pieces = -(-tails // longest)
    if keys:
        longest_k, keys = rounded_length(longest_k), _rounded(int((group[:, 3] + tails).max()))
        pieces = np.maximum(pieces, -(-(keys - group[:, 3]) // longest_k))
    needed = max(segments + 1 + bool(keys), int((group[:, 1] + pieces).max()))
    return Bucket(tokens, _next_capacity(needed), longest, keys, longest_k)


def _rounded(value: int) -> int:
    step = _TOKEN_STEPS[value >= _LONG]
    return -(-value // step) * step


def _next_capacity(segments: int) -> int:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ...: the next of two steps per power of two."""
    step = max(1, 1 << max(0, (segments - 1).bit_length() - 2))
    return -(-segments // step) * step
