"""Shapes of static batches: the sizes of rows, rounded up, in a few buckets that grow with the rows of a run."""

from __future__ import annotations

from typing import NamedTuple

from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length, rounded_up

MOST_BUCKETS = 12
"""In a run. Each costs a recording, and an eager row before it."""
_KEPT_FOR_LARGER = 4
"""Buckets that only rows make that fit into no other."""
_LOOSE = 1.15
"""Cost of a bucket, as a multiple of the row's, above which the row makes a bucket of its own."""
_MOST_PADDED = 3.0
"""Tokens of a bucket, as a multiple of the row's, above which the row runs eagerly: a small model at 2,048 tokens takes
four times as long then."""
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
    images: int = 0
    """Segments of `Blocks`; 0: no tokens attend to each other."""
    image_tokens: int = 0
    """Of these images."""
    image_keys: int = 0
    """Entries of `Blocks.key_index`."""

    @classmethod
    def of(cls, batch: PackedBatch) -> Bucket:
        """Return the size of a plain batch, or the bucket of a static one."""
        size = cls(batch.total_tokens, batch.cu_seqlens.numel() - 1, batch.max_seqlen)
        if (blocks := batch.blocks) is not None:
            counts = blocks.cu_seqlens.numel() - 1, blocks.tokens.numel(), blocks.key_index.numel()
            size = cls(*size[:5], *counts)
        if batch.shared is None:
            return size
        return size._replace(keys=batch.shared.key_index.numel(), max_seqlen_k=batch.shared.max_seqlen_k)

    @property
    def with_keys(self) -> Bucket:
        """The size with keys: each token's own if nothing is shared."""
        return self if self.keys else self._replace(keys=self.tokens, max_seqlen_k=self.max_seqlen)

    def joined(self, other: Bucket) -> Bucket:
        """Return the maxima of two sizes."""
        pair = (self.with_keys, other.with_keys) if self.keys or other.keys else (self, other)
        return Bucket(*map(max, *pair))

    @property
    def cost(self) -> float:
        """Cost in tokens, for comparisons."""
        # Forward has blocks of queries, backward of keys: if nothing is shared these are the same.
        blocks = self.segments * (self.max_seqlen + max(self.max_seqlen, self.max_seqlen_k)) / 2
        blocks += self.images * self.max_seqlen
        return self.tokens + _BLOCK_COST * blocks + _KEY_COST * (self.keys + self.image_keys)

    def pieces_of(self, size: Bucket) -> int:
        """Return the segments of the tail: none has more tokens, or sees more keys, than the bucket's longest."""
        pieces = -(-(self.tokens - size.tokens) // self.max_seqlen)
        return max(pieces, -(-(self.keys - size.with_keys.keys) // self.max_seqlen_k)) if self.keys else pieces

    def image_pieces_of(self, size: Bucket) -> int:
        """Return the images made of what is left over: none has more tokens or keys than the bucket's longest."""
        left = max(self.image_tokens - size.image_tokens, self.image_keys - size.image_keys)
        return -(-left // self.max_seqlen)

    def _holds_images(self, size: Bucket) -> bool:
        """What is left over is of the tail, and each image made of it has a token and a key."""
        pieces, tail = self.image_pieces_of(size), self.tokens - size.tokens
        left = self.image_tokens - size.image_tokens, self.image_keys - size.image_keys
        return min(*left, self.images - size.images) >= pieces and (pieces == 0 or tail > 0)

    def holds(self, size: Bucket) -> bool:
        """Return whether a row of this size fits; one without shared tokens or images into a bucket with them too."""
        tail, pieces = self.tokens - size.tokens, self.pieces_of(size)
        fits = tail >= 0 and size.max_seqlen <= self.max_seqlen and size.segments + pieces <= self.segments
        fits = fits and self._holds_images(size)
        if not self.keys:
            return fits and not size.keys
        # Every token of the tail is its own key, and every piece of it has a token.
        size = size.with_keys
        return fits and size.max_seqlen_k <= self.max_seqlen_k and pieces <= tail <= self.keys - size.keys


class Buckets:
    """The buckets of a run. A row that fits none, or only far larger ones, makes another, until there are enough."""

    def __init__(self) -> None:
        self.made: dict[Bucket, Bucket] = {}
        """Each bucket with the maxima of the rows that it was made for."""
        self._last = list[Bucket]()  # rows, for `share`

    def find(self, size: Bucket) -> Bucket | None:
        """Return the bucket in which a row of this size costs least; None if the row has to run eagerly."""
        own, bucket, left = _around(size, size), self._cheapest(size), MOST_BUCKETS - len(self.made)
        self._last = [*self._last[-31:], size]
        is_loose = bucket is not None and bucket.cost > _LOOSE * own.cost
        if (left > 0 and bucket is None) or (left > _KEPT_FOR_LARGER and is_loose):
            # Around the rows of an earlier bucket too if that costs little: packed rows soon have one for all of them.
            wider = {_around(size, most): most for most in map(size.joined, self.made.values())}
            fitting = (one for one in wider if one.holds(size) and one.cost <= _LOOSE * own.cost)
            found = max(fitting, key=lambda one: one.cost, default=own)
            if found.holds(size):  # else more keys are left over than the tail has tokens
                self.made[found] = wider.get(found, size)
                return found
        return None if bucket is None or bucket.tokens > _MOST_PADDED * _whole_tiles(size.tokens) else bucket

    def _cheapest(self, size: Bucket) -> Bucket | None:
        return min((one for one in self.made if one.holds(size)), key=lambda one: one.cost, default=None)

    def share(self, bucket: Bucket) -> float:
        """Return the share of the last rows that run in a bucket, as the buckets are now."""
        return sum(self._cheapest(size) == bucket for size in self._last) / len(self._last)


def _around(size: Bucket, most: Bucket) -> Bucket:
    """Return `most` rounded up, with segments for the tail of a row of that size, and for that of `size`."""
    if most.keys:
        size = size.with_keys
    tail = 1 + bool(most.keys)  # keys left over need a tail that sees them
    tokens, longest = _whole_tiles(most.tokens + bool(most.keys or most.images)), rounded_length(most.max_seqlen)
    bucket = most._replace(tokens=tokens, max_seqlen=longest, max_seqlen_k=rounded_length(most.max_seqlen_k))
    if most.keys:
        keys = max(one.keys + bucket.tokens - one.tokens for one in (size, most))
        bucket = bucket._replace(keys=-(-keys // 64) * 64)  # by little: each key left over is one of the tail's
    if most.images:
        # So many more that each image of the tail has a token and a key.
        more = max(most.image_tokens, most.image_keys) // longest + 2
        tokens, keys = _whole_tiles(most.image_tokens + more), _whole_tiles(most.image_keys + more)
        bucket = bucket._replace(image_tokens=tokens, image_keys=keys)
        images = max(one.images + bucket.image_pieces_of(one) for one in (size, most))
        bucket = bucket._replace(images=rounded_up(images, 2, 1))
    needed = max(one.segments + bucket.pieces_of(one) for one in (size, most)) + tail
    return bucket._replace(segments=rounded_up(needed, 2, 1))  # 1, 2, 3, 4, 6, 8, 12, 16, ...


def _whole_tiles(tokens: int) -> int:
    """Round up by at most a sixteenth, from 1,024 tokens on to whole tiles of matmuls."""
    return rounded_up(tokens, 16, 8)
