"""Metrics that stay on the device until they are logged, with the values that TRL's ``compute_loss`` would log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from trl import SFTTrainer

Mode = Literal["train", "eval"]

_MANY = 256
"""Tensors of a few numbers, each with a block of device memory of its own."""


class _MicroBatch(NamedTuple):
    """Facts of a micro-batch on the host."""

    mode: Mode
    valid: int
    """Tokens that the loss counts."""
    tokens: int
    """Tokens of the row; counted in training only."""
    ranks: int
    """Ranks whose part counts: the last batch of a data set may repeat rows on the others."""


class DeferredMetrics:
    """Sums per micro-batch, kept on the device and read once per log.

    TRL logs the mean over micro-batches of ratios per micro-batch (summed over ranks first), not the ratio of sums; so
    one row of (entropy, correct tokens, auxiliary loss) is kept for each micro-batch. `flush` gathers all of them as
    one tensor of (ranks, micro-batches, 5), reads it once, and appends to TRL's lists what TRL would have appended.
    """

    def __init__(self) -> None:
        self._tables: list[Tensor] = []
        self._batches: list[list[_MicroBatch]] = []
        self._flushes = 0

    def keep(
        self, trainer: SFTTrainer, mode: Mode, table: Tensor, loss_tokens: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Keep a copy of the figures of one micro-batch, or of several in one row, without synchronizing.

        Args:
            mode: which of TRL's lists they belong to.
            table: (num_parts, 3) as of `step_loss`; rows past the counts are left out.
            loss_tokens: tokens of each part that the loss counts.
            tokens: tokens of the row of each part.
        """
        ranks = counted_ranks(trainer.accelerator)
        self._tables.append(table[: len(loss_tokens)].clone())
        self._batches.append([_MicroBatch(mode, *each, ranks) for each in zip(loss_tokens, tokens, strict=True)])

    def rollback_point(self) -> tuple[int, int]:
        """Return the point for `rollback`: flushes so far, and rows since, which are joined once there are many."""
        if len(self._tables) > _MANY:
            self._tables, self._batches = [torch.cat(self._tables)], [list(chain.from_iterable(self._batches))]
        return self._flushes, len(self._tables)

    def is_past(self, point: tuple[int, int]) -> bool:
        """Return whether metrics were flushed since a rollback point, which makes it unreachable."""
        return self._flushes != point[0]

    def rollback(self, point: tuple[int, int]) -> None:
        """Drop the rows since a rollback point, because they run again."""
        del self._tables[point[1] :], self._batches[point[1] :]

    def flush(self, trainer: SFTTrainer) -> None:
        """Append the kept figures to ``trainer._metrics``. A collective: every rank must call it.

        It is the one read of the device between two logs.
        """
        if not self._batches:
            return
        self._flushes += 1
        batches, sums = [*chain.from_iterable(self._batches)], torch.cat(self._tables)
        self._batches, self._tables = [], []
        counts = torch.tensor([[batch.valid, batch.tokens] for batch in batches], dtype=torch.float32)
        table = torch.cat([sums, counts.to(sums.device, non_blocking=True)], dim=1)
        rows = trainer.accelerator.gather(table).view(-1, *table.shape).transpose(0, 1).tolist()
        for batch, of_ranks in zip(batches, rows, strict=True):
            entropy, correct, aux, valid, tokens = map(sum, zip(*of_ranks[: batch.ranks], strict=True))
            lists = trainer._metrics[batch.mode]
            lists["entropy"].append(entropy / valid if valid > 0 else 0.0)
            lists["mean_token_accuracy"].append(correct / valid if valid > 0 else 0.0)
            if batch.mode == "train":
                trainer._total_train_tokens += int(tokens) // trainer._tp_size
            lists["num_tokens"] = [trainer._total_train_tokens]
            if trainer.aux_loss_enabled:
                lists["aux_loss"].append(aux / batch.ranks)


def counted_ranks(accelerator: Any) -> int:
    """Return the number of ranks that ``gather_for_metrics`` would count, for the batch just fetched."""
    state, ranks = accelerator.gradient_state, int(accelerator.num_processes)
    if ranks > 1 and state.end_of_dataloader and state.remainder > 0:
        return min(ranks, int(state.remainder))
    return ranks


class FlushedOnRead:
    """An attribute of TRL's trainer that `DeferredMetrics` completes when it is read between two logs.

    With several processes it is as of the last log, because flushing is a collective.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        instance._fastpack_flush(alone=True)
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value
