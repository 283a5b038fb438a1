"""The buckets of a run: chosen from its rows and from a sample of its data, again once other rows come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.packing.batching import fast_view, packing_collator
from fastpack_trl.packing.buckets import Bucket, choose_buckets, smallest_fitting
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import Run

logger = get_logger(__name__)

_SAMPLE, _LEAST, _SEEN = 256, 32, 16
"""Rows of the data set that are looked at, some ten milliseconds; merged rows at least; rows of a stream before any."""
_TOO_LONG = 1.5
"""Tokens of a bucket, as a multiple of the row's, from which buckets count as made for other rows."""
_MOST_PADDED = 3.0
"""Tokens of a bucket, as a multiple of the row's, from which the row runs eagerly: a small model at 2,048 tokens takes
four times as long then."""
_LOOK_BACK = 64
_LEAST_SERVED = 0.8
_TIMES = 3
"""How often buckets are chosen in a run: each costs the graphs of those before."""

Draw = Callable[[int], list[Bucket]]
"""Returns the sizes of some rows as they will come, each merged of so many micro-batches; none if that is unknown."""


class RowBuckets:
    """Finds the bucket that a row runs in.

    Args:
        draw: see `Draw`. If it returns none, some rows have to have come first.

    Attributes:
        choice: the buckets in use; None before the first row, and once other rows have come.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._seen: deque[Bucket] = deque(maxlen=_SAMPLE)
        self._tokens = self._padded = self._rows = self._fitting = 0
        self._served: deque[bool] = deque(maxlen=_LOOK_BACK)
        self._chosen = 0
        self.choice: tuple[Bucket, ...] | None = None

    def find(self, size: Bucket, parts: int = 1) -> Bucket | None:
        """Return the bucket of a row of so many micro-batches; None if it fits into none, or only a far longer one."""
        self._seen.append(size)
        if self.choice is None:
            expected = self._draw(parts)
            if not expected and len(self._seen) < _SEEN:
                return None
            self._chosen += 1
            self.choice = choose_buckets([*self._seen, *expected])
            logger.debug(f"cuda_graph: {self.choice}")
        bucket = smallest_fitting(self.choice, size)
        if bucket is not None and bucket.tokens > _MOST_PADDED * size.tokens:
            bucket = None
        self._served.append(bucket is not None and bucket.tokens <= _TOO_LONG * size.tokens)
        self._rows, self._fitting = self._rows + 1, self._fitting + self._served[-1]
        if bucket is not None:
            self._tokens += size.tokens
            self._padded += bucket.tokens - size.tokens
        return bucket

    def __str__(self) -> str:
        """Describe the padding of rows that ran in buckets, and the share of all rows that fitted well."""
        fit = self._fitting / max(1, self._rows)
        return f"padding of {self._padded / max(1, self._tokens):.1%}; {fit:.0%} of rows fit"

    def are_outgrown(self) -> bool:
        """Return whether too many of the last rows fitted into no bucket; then the next row makes others."""
        if self._chosen >= _TIMES or len(self._served) < _LOOK_BACK or sum(self._served) >= _LEAST_SERVED * _LOOK_BACK:
            return False
        self._served.clear()
        self.choice = None
        return True


def draw_packed(run: Run, parts: int) -> list[Bucket]:
    """Return sizes of packed rows drawn from the data set of SFT, as `Draw`."""
    trainer = run.trainer
    if not isinstance(trainer.train_dataset, Dataset):
        return []
    rows = fast_view(trainer, trainer.train_dataset)
    collator = packing_collator(trainer, share_prefixes=run.shares_prefixes)
    drawn, count, each = random.Random(trainer.args.seed), len(rows), trainer.args.per_device_train_batch_size

    def draw() -> PackedBatch:
        batch: PackedBatch = collator([rows[drawn.randrange(count)] for _ in range(each)])["packed_batch"]
        return batch

    return [
        merged_size([Bucket.of(draw()) for _ in range(parts)])
        for _ in range(min(count, max(_LEAST, _SAMPLE // (parts * each))))
    ]


def merged_size(sizes: Sequence[Bucket]) -> Bucket:
    """Return the size of the row that rows of these sizes are merged to."""
    if any(size.keys for size in sizes):
        sizes = [size.with_keys for size in sizes]
    tokens, segments, longest, keys, longest_k = zip(*sizes, strict=True)
    return Bucket(sum(tokens), sum(segments), max(longest), sum(keys), max(longest_k))
