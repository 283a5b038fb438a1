"""The buckets of a run: chosen from its rows and from what its data set will give, again where rows of others come."""

from __future__ import annotations

import random
from collections import Counter, deque

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.packing.batching import fast_view, packing_collator
from fastpack_trl.packing.buckets import Bucket, BucketChoice, RowSize, choose_buckets, smallest_fitting
from fastpack_trl.run import Run

logger = get_logger(__name__)

_SAMPLE = 256
"""Rows of the data set that are looked at: some ten milliseconds."""
_LOOK_BACK = 64
_LEAST_SERVED = 0.8
_EAGER_COST = 2.0
"""Of a row without a bucket, as a share of its tokens: a small model at 2,048 tokens takes four times as long eager."""
_MOST = 6
"""Buckets: all graphs are in one pool of memory, each costs half a second and two eager rows."""
_TIMES = 3
"""How often buckets are chosen in a run: each costs the graphs of those before."""


class RowBuckets:
    """Which bucket a row runs in.

    Args:
        run: whose rows they are.

    Attributes:
        choice: the buckets in use; None before the first row, and when other rows have come.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: Counter[RowSize] = Counter()
        self._served: deque[bool] = deque(maxlen=_LOOK_BACK)
        self._chosen = 0
        self.choice: BucketChoice | None = None

    def find(self, size: RowSize) -> Bucket | None:
        """Return the bucket of a row; None where it fits into none and runs in its own shapes."""
        if self.choice is None:
            self._seen[size] += 1
            self._chosen += 1
            self.choice = choose_buckets(
                (self._seen + self._expected(size.parts)).elements(), at_most=_MOST, eager_cost=_EAGER_COST
            )
            logger.debug(f"cuda_graph: {self.choice}")
        bucket = smallest_fitting(self.choice.buckets, size)
        self._served.append(bucket is not None)
        if bucket is None:
            self._seen[size] += 1
        return bucket

    def are_outgrown(self) -> bool:
        """Return whether too many of the last rows fitted into no bucket; then the next row makes others."""
        if self._chosen >= _TIMES or len(self._served) < _LOOK_BACK or sum(self._served) >= _LEAST_SERVED * _LOOK_BACK:
            return False
        self._served.clear()
        self.choice = None
        return True

    def _expected(self, parts: int) -> Counter[RowSize]:
        """Return sizes of rows as they will come: drawn from the data set, merged of as many parts as the last."""
        trainer = self._run.trainer
        if not isinstance(trainer.train_dataset, Dataset):
            return Counter()
        rows, collator = fast_view(trainer, trainer.train_dataset), packing_collator(trainer)
        drawn, count, each = random.Random(trainer.args.seed), len(rows), trainer.args.per_device_train_batch_size
        sizes: Counter[RowSize] = Counter()
        for _ in range(min(_SAMPLE, count)):
            collated = [collator([rows[drawn.randrange(count)] for _ in range(each)]) for _ in range(parts)]
            sizes[merged_size([RowSize.of(one["packed_batch"]) for one in collated])] += 1
        return sizes


def merged_size(sizes: list[RowSize]) -> RowSize:
    """Return the size of the row that micro-batches of these sizes are merged to."""
    tokens, segments, longest, loss_tokens, parts = zip(*sizes, strict=True)
    return RowSize(sum(tokens), sum(segments), max(longest), sum(loss_tokens), sum(parts))
