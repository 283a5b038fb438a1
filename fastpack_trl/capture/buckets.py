"""The buckets of a run: chosen from its rows and from a sample of its data, again once other rows come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from fastpack_trl.model.hooks import is_users
from fastpack_trl.packing.buckets import Bucket, choose_buckets, smallest_fitting
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.prompt_groups import KEY, PromptGroupsCollator
from fastpack_trl.run import Run

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
        bucket = smallest_fitting(self.choice, size)
        if bucket is not None and bucket.tokens > _MOST_PADDED * size.tokens:
            bucket = None
        self._served.append(bucket is not None and bucket.tokens <= _TOO_LONG * size.tokens)
        return bucket

    def are_outgrown(self) -> bool:
        """Return whether too many of the last rows fitted into no bucket; then the next row makes others."""
        if self._chosen >= _TIMES or len(self._served) < _LOOK_BACK or sum(self._served) >= _LEAST_SERVED * _LOOK_BACK:
            return False
        self._served.clear()
        self.choice = None
        return True


def draw_sizes(run: Run, parts: int) -> list[Bucket]:
    """Return sizes of rows as they will come, as `Draw`: collated from examples that are drawn from the data set.

    None from a stream, or if the user's collator makes the batches: it may draw from a generator, or count.
    """
    loader: Any = run.trainer.callback_handler.train_dataloader
    data, collate = loader.dataset, getattr(loader.collate_fn, "data_collator", loader.collate_fn)
    is_ours = isinstance(collate, PackingCollator | PromptGroupsCollator)
    if not is_ours or isinstance(data, IterableDataset) or is_users(getattr(collate, "inner", collate)):
        return []
    drawn, count, each = random.Random(run.args.seed), len(data), run.args.per_device_train_batch_size
    rows: list[list[Bucket]] = []
    for _ in range(min(count, max(_LEAST, _SAMPLE // (parts * each)))):
        batches = [collate([data[drawn.randrange(count)] for _ in range(each)]) for _ in range(parts)]
        if isinstance(collate, PackingCollator):
            rows.append([Bucket.of(batch["packed_batch"]) for batch in batches])
        else:
            groups = [groups for batch in batches for groups in batch[KEY].values()]
            rows += [[Bucket.of(one.batch)] for one in groups if not isinstance(one, str)]
    return [merged_size(sizes) for sizes in rows]


def merged_size(sizes: Sequence[Bucket]) -> Bucket:
    """Return the size of the row that rows of these sizes are merged to."""
    if any(size.keys for size in sizes):
        sizes = [size.with_keys for size in sizes]
    tokens, segments, longest, keys, longest_k = zip(*sizes, strict=True)
    return Bucket(sum(tokens), sum(segments), max(longest), sum(keys), max(longest_k))
