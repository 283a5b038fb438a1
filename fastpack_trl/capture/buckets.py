"""The buckets of a run: chosen from its rows and from what its data set will give, again where rows of others come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.packing.batching import fast_view, packing_collator
from fastpack_trl.packing.buckets import Bucket, RowSize, choose_buckets, sizes_with_keys, smallest_fitting
from fastpack_trl.run import Run

logger = get_logger(__name__)

_SAMPLE, _LEAST, _SEEN = 256, 32, 16
"""Rows of the data set that are looked at, some ten milliseconds; of merged rows at least; of a stream before any."""
_TOO_LONG = 1.5
"""Tokens of a bucket, as a multiple of the row's, from which buckets count as made for other rows."""
_LOOK_BACK = 64
_LEAST_SERVED = 0.8
_EAGER_COST = 2.0
"""Of a row without a bucket, as a share of its tokens: a small model at 2,048 tokens takes four times as long eager."""
_MOST = 6
"""Buckets: all graphs are in one pool of memory. Those of one number of tokens are recorded at once, a fraction of a
second each; one of other tokens costs an eager row too."""
_TIMES = 3
"""How often buckets are chosen in a run: each costs the graphs of those before."""


class RowBuckets:
    """Which bucket a row runs in.

    Args:
        run: whose rows they are.
        draw: returns sizes of rows as they will come; None: packed rows drawn from the data set. Where it finds none,
            some rows have to have come first.

    Attributes:
        choice: the buckets in use; None before the first row, and when other rows have come.
    """

    def __init__(self, run: Run, draw: Callable[[int], list[RowSize]] | None = None) -> None:
        self._run, self._draw = run, draw
        self._seen: deque[RowSize] = deque(maxlen=_SAMPLE)
        self._tokens = self._padded = self._rows = self._fitting = 0
        self._served: deque[bool] = deque(maxlen=_LOOK_BACK)
        self._chosen = 0
        self.choice: tuple[Bucket, ...] | None = None

    def find(self, size: RowSize, parts: int = 1) -> Bucket | None:
        """Return the bucket of a row; None where it fits into none, or only into one that is far too long."""
        self._seen.append(size)
        if self.choice is None:
            expected = self._expected(parts) if self._draw is None else self._draw(parts)
            if not expected and len(self._seen) < _SEEN:
                return None
            self._chosen += 1
            rows = [*self._seen, *expected]
            self.choice = choose_buckets(rows, at_most=_MOST, eager_cost=_EAGER_COST)
            logger.debug(f"cuda_graph: {self.choice}")
        bucket = smallest_fitting(self.choice, size)
        if bucket is not None and bucket.tokens > (1 + _EAGER_COST) * size.tokens:
            bucket = None
        self._served.append(bucket is not None and bucket.tokens <= _TOO_LONG * size.tokens)
        self._rows, self._fitting = self._rows + 1, self._fitting + self._served[-1]
        if bucket is not None:
            self._tokens += size.tokens
            self._padded += bucket.tokens - size.tokens
        return bucket

    def beside(self, bucket: Bucket) -> list[Bucket]:
        """Return the other buckets in use for rows of as many tokens, loss positions and parts."""
        others = self.choice or ()
        alike = [other for other in others if _sizes(other) == _sizes(bucket)]
        return [other for other in alike if other != bucket]

    def __str__(self) -> str:
        """Say what the rows that ran in buckets were padded by, and which share of all fitted well."""
        fit = self._fitting / max(1, self._rows)
        return f"padding of {self._padded / max(1, self._tokens):.1%}; {fit:.0%} of rows fit"

    def are_outgrown(self) -> bool:
        """Return whether too many of the last rows fitted into no bucket; then the next row makes others."""
        if self._chosen >= _TIMES or len(self._served) < _LOOK_BACK or sum(self._served) >= _LEAST_SERVED * _LOOK_BACK:
            return False
        self._served.clear()
        self.choice = None
        return True

    def _expected(self, parts: int) -> list[RowSize]:
        """Return sizes of rows as they will come: drawn from the data set, merged of as many parts as the last."""
        trainer = self._run.trainer
        if not isinstance(trainer.train_dataset, Dataset):
            return []
        rows = fast_view(trainer, trainer.train_dataset)
        collator = packing_collator(trainer, share_prefixes=self._run.shares_prefixes)
        drawn, count, each = random.Random(trainer.args.seed), len(rows), trainer.args.per_device_train_batch_size
        sizes = []
        for _ in range(min(count, max(_LEAST, _SAMPLE // (parts * each)))):
            collated = [collator([rows[drawn.randrange(count)] for _ in range(each)]) for _ in range(parts)]
            sizes.append(merged_size([RowSize.of_row(one["packed_batch"]) for one in collated]))
        return sizes


def _sizes(bucket: Bucket) -> Bucket:
    # Rows that one document fills may run another kernel.
    return bucket._replace(segments=min(bucket.segments, 2), max_seqlen=0, max_seqlen_k=0)


def merged_size(sizes: Sequence[RowSize]) -> RowSize:
    """Return the size of the row that micro-batches of these sizes are merged to."""
    sizes = sizes_with_keys(sizes)
    tokens, segments, longest, loss_tokens, parts, keys, longest_k = zip(*sizes, strict=True)
    return RowSize(
        sum(tokens), sum(segments), max(longest), sum(loss_tokens), sum(parts), sum(keys), max(longest_k)
    )  # fmt: skip
