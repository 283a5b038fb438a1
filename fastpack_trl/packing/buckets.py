"""Shapes for static batches: few buckets, chosen from the sizes of the rows as they run, that serve nearly all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length

_TOKEN_STEPS = (8, 64)
"""Tokens and loss positions are rounded up to them, below and from `_LONG` on: whole tiles of the matrix products."""
_LONG = 1024
_LOSS_SHARE = 0.8
"""Where nearly all rows count at least this share of their tokens, one capacity of loss positions serves them all."""
_NEARLY_ALL = 0.05
"""Share of the rows that may lie below a bound that holds for "nearly all"."""
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_KEY_QUANTILES = (0.5, 0.95, 1.0)
# Costs in tokens of the row, as a model of a decoder: only their order of magnitude matters.
_LOSS_COST = 0.25
"""Of a loss position: the head's share of the work of one token in a small model."""
_SEGMENT_COST = 0.5
"""Of a surplus segment: its rows of the backward buffer, cleared and copied."""
BLOCK_COST = 0.0025
"""Of a surplus token of segments x max_seqlen, with torch's kernel: blocks that find nothing to do. 0.0023 to 0.0030 in
a layer of Qwen3-0.6B's shape on an H200, at 2,048 and 8,192 tokens; half of it in one of Qwen3-8B's."""
_KEY_COST = 0.03
"""Of a surplus key: gathered, added back, and seen by the tail. By its traffic to memory, in a layer of Qwen3-0.6B's
shape: some 30 KB, of the 0.3 microseconds that a token takes there on an H200."""
_MOST_SIZES = 1024
"""Different rows that are weighed; of more, evenly spaced ones. The cost is counted over all."""
_LEAST_GAIN = 0.02
"""Share of all tokens that a further bucket has to save; a graph takes time to capture, and memory."""


class RowSize(NamedTuple):
    """What of a row has to fit: ``RowSize(tokens=2031, segments=7, max_seqlen=509, loss_tokens=2024, parts=1)``."""

    tokens: int
    """Of its documents."""
    segments: int
    """Documents."""
    max_seqlen: int
    """Tokens of the longest document."""
    loss_tokens: int
    parts: int
    keys: int = 0
    """Keys of its segments where documents share tokens; 0: it holds every document whole."""
    max_seqlen_k: int = 0
    """Then, of the segment that has most."""

    @classmethod
    def of(cls, batch: PackedBatch) -> RowSize:
        """Return the size of a plain batch; its padding is not counted, since a static row has a tail of its own.

        Raises:
            ValueError: a batch without `loss_positions`.
        """
        if batch.loss_positions is None:
            raise ValueError("the batch has no loss_positions: give the collator labels")
        lengths, counted = batch.seq_lengths, batch.loss_positions.numel()
        size = cls(sum(lengths), len(lengths), max(lengths), counted, max(1, len(batch.parts)))
        if batch.shared is None:
            return size.with_keys if batch.documents is not None else size
        keys = batch.shared.key_index.numel() - batch.num_padding
        return size._replace(keys=keys, max_seqlen_k=batch.shared.max_seqlen_k)

    @property
    def with_keys(self) -> RowSize:
        """Return the size with keys: each token's own where nothing is shared."""
        return self if self.keys else self._replace(keys=self.tokens, max_seqlen_k=self.max_seqlen)

    @classmethod
    def of_row(cls, batch: PackedBatch) -> RowSize:
        """Return the size of a batch whose loss does not go by positions: it has no loss tokens."""
        return cls.of(replace(batch, loss_positions=torch.empty(0, dtype=torch.int64)))


class Bucket(NamedTuple):
    """The shapes of a static batch; all batches in it look the same to the host.

    ``Bucket(tokens=2048, segments=16, max_seqlen=640, loss_tokens=2048, parts=1)``
    """

    tokens: int
    """Of the row, its tail included."""
    segments: int
    """`cu_seqlens` has one entry more. Surplus ones have length 0."""
    max_seqlen: int
    """Tokens of the longest segment, at least."""
    loss_tokens: int
    """Entries of `loss_positions`. Surplus ones are masked."""
    parts: int = 1
    """`part_bounds` has one entry more. Surplus ones have no tokens."""
    keys: int = 0
    """Entries of `SharedKeys.key_index`; 0: rows hold every document whole. The tail sees what is left of them."""
    max_seqlen_k: int = 0
    """Keys of the segment that has most, at least."""

    @classmethod
    def of(cls, static: PackedBatch) -> Bucket:
        """Return the bucket of a static batch, from its shapes.

        Raises:
            ValueError: a plain batch.
        """
        if static.part_bounds is None or static.loss_positions is None:
            raise ValueError("a plain batch has no bucket: choose one with smallest_fitting")
        return cls(
            tokens=static.total_tokens,
            segments=static.cu_seqlens.numel() - 1,
            max_seqlen=static.max_seqlen,
            loss_tokens=static.loss_positions.numel(),
            parts=static.part_bounds.numel() - 1,
            keys=0 if static.shared is None else static.shared.key_index.numel(),
            max_seqlen_k=0 if static.shared is None else static.shared.max_seqlen_k,
        )

    def pieces_of(self, size: RowSize) -> int:
        """Return the segments of the tail: none has more tokens, or sees more keys, than the bucket's longest."""
        pieces = max(0, -(-(self.tokens - size.tokens) // self.max_seqlen))
        return max(pieces, -(-(self.keys - size.with_keys.keys) // self.max_seqlen_k)) if self.keys else pieces

    def segments_of(self, size: RowSize) -> int:
        """Return the segments that a row takes here: its documents, and the pieces of its tail."""
        return size.segments + self.pieces_of(size)

    def holds(self, size: RowSize) -> bool:
        """Return whether a row of this size fits; one without shared tokens fits beside keys too."""
        fits = (
            size.tokens <= self.tokens
            and size.max_seqlen <= self.max_seqlen
            and size.loss_tokens <= self.loss_tokens
            and size.parts <= self.parts
            and self.segments_of(size) <= self.segments
        )
        if not self.keys:
            return fits and not size.keys
        # Every token of the tail is its own key, and every piece of it has a token.
        tail, left = self.tokens - size.tokens, self.keys - size.with_keys.keys
        return fits and size.with_keys.max_seqlen_k <= self.max_seqlen_k and self.pieces_of(size) <= tail <= left


def smallest_fitting(buckets: Iterable[Bucket], row: PackedBatch | RowSize) -> Bucket | None:
    """Return the bucket in which a row costs least; None if it fits into none."""
    size = RowSize.of(row) if isinstance(row, PackedBatch) else row
    return min((bucket for bucket in buckets if bucket.holds(size)), key=_cost_of, default=None)


def choose_buckets(
    rows: Iterable[PackedBatch | RowSize],
    *,
    at_most: int = 4,
    eager_cost: float = 0.5,
) -> tuple[Bucket, ...]:
    """Choose the buckets of a run from rows as they run, merged ones too; the one that serves most comes first.

    One bucket after the other is added: that which saves most, counting tokens of tails, masked loss positions, empty
    segments and blocks; then those before are chosen again beside it, as long as that saves more. It ends where a
    further one would save less than 2 % of all tokens. A row beyond the ordinary may have none. The same rows give the
    same buckets.

    Args:
        rows: a sample of the run's, in any order.
        at_most: buckets.
        eager_cost: what a row without a bucket costs beyond one in its own shape, as a share of its tokens. Of a step
            whose device is idle for a share ``s`` of the time it is ``s / (1 - s)``: padding beyond it does not pay.

    Raises:
        ValueError: no row, or no bucket.
    """
    sizes = Counter(sizes_with_keys([RowSize.of(row) if isinstance(row, PackedBatch) else row for row in rows]))
    if not sizes or at_most < 1:
        raise ValueError(f"choose_buckets needs rows and room for a bucket: got {len(sizes)} rows, at_most={at_most}")
    ordered = sorted(sizes, reverse=True)
    ordered = ordered[:: -(-len(ordered) // _MOST_SIZES)]  # the largest is among them
    table = np.array(ordered, dtype=np.int64)
    weights = np.array([sizes[size] for size in ordered], dtype=np.float64)
    candidates = _candidates(table, weights)
    costs, eager = _costs(candidates, table), table[:, 0] * eager_cost

    def cost(of: list[int]) -> float:
        return float(np.minimum(eager, costs[of].min(axis=0, initial=math.inf)) @ weights)

    def joined_by_best(others: list[int]) -> list[int]:
        left = np.minimum(eager, costs[others].min(axis=0, initial=math.inf))
        return [*others, int((np.maximum(left - costs, 0.0) @ weights).argmax())]

    least = _LEAST_GAIN * float(weights @ table[:, 0])
    chosen: list[int] = []
    while len(chosen) < at_most:
        more, before = joined_by_best(chosen), math.inf
        while len(more) > 1 and cost(more) < before * (1 - 1e-9):
            before = cost(more)
            for place in range(len(more)):
                more = min(more, joined_by_best(more[:place] + more[place + 1 :]), key=cost)
        gain = cost(chosen) - cost(more)
        if gain <= 0 or gain < least:
            break
        chosen = more
    return _tightened([Bucket(*map(int, candidates[one])) for one in chosen], sizes)


def _candidates(table: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return (C, 7), one bucket per row: the levels of each dimension in all combinations."""
    counts = weights.astype(np.int64)
    tokens, segments, longest, loss, parts, keys, longest_k = table.T
    shares = bool(keys.any())
    token_levels = _levels(tokens + shares, counts, _up)  # keys that are left over need a tail that sees them
    mostly_counted = np.quantile(np.repeat(loss / tokens, counts), _NEARLY_ALL) >= _LOSS_SHARE
    loss_levels = [2**62] if mostly_counted else [*_levels(loss, counts, _up), 2**62]
    grid = np.array(
        [
            (row, capacity, length, min(row, positions), int(parts.max()), *seen)
            for row in token_levels
            for length in _levels(longest, counts, rounded_length)
            for capacity in _levels(segments + 1 + shares, counts, _next_capacity)
            for positions in loss_levels
            for seen in (_key_levels(row, tokens, keys, longest_k, counts) if shares else [(0, 0)])
        ],
        dtype=np.int64,
    )
    return np.unique(grid, axis=0)


def _key_levels(
    row: int, tokens: NDArray[np.int64], keys: NDArray[np.int64], longest: NDArray[np.int64], counts: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Return numbers of keys, and of a segment's, for rows that fit into `row` tokens: theirs, and the tail's."""
    fitting = tokens < row
    if not fitting.any():
        return []
    needed = _levels((keys + row - tokens)[fitting], counts[fitting], _up, _KEY_QUANTILES)
    lengths = _levels(longest[fitting], counts[fitting], rounded_length, _KEY_QUANTILES)
    return [(count, length) for count in needed for length in lengths]


def sizes_with_keys(sizes: Iterable[RowSize]) -> Sequence[RowSize]:
    """Return sizes that have keys, all of them, where one has."""
    sizes = list(sizes)
    return [size.with_keys for size in sizes] if any(size.keys for size in sizes) else sizes


def _levels(
    values: NDArray[np.int64], counts: NDArray[np.int64], round_up: Any, quantiles: tuple[float, ...] = _QUANTILES
) -> list[int]:
    """Return the values at a few quantiles, rounded up; one alone where nearly all are close to the largest."""
    found: NDArray[np.int64] = np.quantile(np.repeat(values, counts), (_NEARLY_ALL, *quantiles), method="higher")
    levels = sorted({int(round_up(int(value))) for value in found[1:]})
    return levels[-1:] if round_up is _up and found[0] >= 0.9 * found[-1] else levels


def _up(value: int) -> int:
    step = _TOKEN_STEPS[value >= _LONG]
    return max(1, -(-value // step)) * step


def _next_capacity(segments: int) -> int:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ...: the next of two steps per power of two."""
    step = max(1, 1 << max(0, (segments - 1).bit_length() - 2))
    return -(-segments // step) * step


def _costs(buckets: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (buckets, rows): what a bucket costs a row, in tokens, infinite where the row does not fit."""
    tokens, capacity, longest, positions, parts, keys, longest_k = buckets.T[..., None]
    row_tokens, documents, row_longest, row_positions, row_parts, row_keys, row_longest_k = rows.T[:, None]
    tail, left = tokens - row_tokens, keys - row_keys
    pieces = -(-np.maximum(tail, 0) // longest)
    fits = (tail >= 0) & (row_longest <= longest) & (row_positions <= positions) & (row_parts <= parts)
    if row_keys.any():
        pieces = np.maximum(pieces, -(-left // np.maximum(longest_k, 1)))
        fits = fits & (pieces <= tail) & (tail <= left) & (row_longest_k <= longest_k)
    fits &= documents + pieces <= capacity
    cost = tail + _LOSS_COST * (positions - row_positions) + _SEGMENT_COST * (capacity - documents) + _KEY_COST * left
    # Forward has blocks of queries, backward of keys: where nothing is shared these are the same.
    blocks = capacity * (longest + np.maximum(longest, longest_k)) / 2
    cost = cost + BLOCK_COST * (blocks - documents * (row_longest + np.maximum(row_longest, row_longest_k)) / 2)
    return np.where(fits, cost, math.inf)


def _cost_of(bucket: Bucket) -> tuple[float, Bucket]:
    longest = (bucket.max_seqlen + max(bucket.max_seqlen, bucket.max_seqlen_k)) / 2
    return (
        bucket.tokens + _LOSS_COST * bucket.loss_tokens + _SEGMENT_COST * bucket.segments + _KEY_COST * bucket.keys
        + BLOCK_COST * bucket.segments * longest,
        bucket,
    )  # fmt: skip


def _tightened(buckets: Iterable[Bucket], sizes: Counter[RowSize]) -> tuple[Bucket, ...]:
    """Return the buckets that rows go into, the most used first, each with parts for no more than its rows have."""
    rows: Counter[Bucket] = Counter()
    parts: dict[Bucket, int] = {}
    for size, count in sizes.items():
        if (bucket := smallest_fitting(buckets, size)) is not None:
            rows[bucket] += count
            parts[bucket] = max(parts.get(bucket, 1), size.parts)
    used: Counter[Bucket] = Counter()
    for bucket, count in rows.items():
        used[bucket._replace(parts=parts[bucket])] += count
    return tuple(sorted(used, key=lambda bucket: (-used[bucket], bucket)))
