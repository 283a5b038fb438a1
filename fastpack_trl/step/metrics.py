"""Metrics that stay on the device until they are logged, with the values that TRL's ``compute_loss`` would log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from trl import SFTTrainer

Mode = Literal["train", "eval"]

_ROWS = 256


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """Facts of a micro-batch on the host."""

    mode: Mode
    valid: int
    """Tokens that the loss counts."""
    tokens: int
    """Tokens of the row; counted in training only."""
    ranks: int
    """Ranks whose part counts: the last batch of a data set may repeat rows on the others."""
    has_aux: bool


class DeferredMetrics:
    """Sums per micro-batch, kept on the device and read once per log.

    TRL logs the mean over micro-batches of ratios per micro-batch (summed over ranks first), not the ratio of sums; so
    one row of (entropy, correct tokens, auxiliary loss) is kept for each micro-batch. `flush` gathers all of them as
    one tensor of (ranks, micro-batches, 5), reads it once, and appends to TRL's lists what TRL would have appended.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # (_ROWS, 3) fp32 each: no tensor per micro-batch stays alive
        self._batches: list[_MicroBatch] = []
        self._flushes = 0

    def keep(
        self, trainer: SFTTrainer, mode: Mode, table: Tensor, loss_tokens: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Keep a copy of the figures of one micro-batch, or of several in one row; asks the device nothing.

        Args:
            trainer: whose accelerator knows the ranks.
            mode: which of TRL's lists they belong to.
            table: (num_parts, 3) as of `StepLoss`; rows past the counts are left out.
            loss_tokens: of each part, those that the loss counts.
            tokens: of each part, those of the row that it was.
        """
        count, done = len(loss_tokens), 0
        while done < count:
            place = len(self._batches) % _ROWS
            if not place:
                self._blocks.append(torch.empty(_ROWS, 3, dtype=torch.float32, device=table.device))
            now = min(count - done, _ROWS - place)
            self._blocks[-1][place : place + now].copy_(table[done : done + now])
            ranks = counted_ranks(trainer.accelerator)
            self._batches += [
                _MicroBatch(mode, valid, row, ranks, bool(trainer.aux_loss_enabled))
                for valid, row in zip(loss_tokens[done : done + now], tokens[done : done + now], strict=True)
            ]
            done += now

    def rollback_point(self) -> tuple[int, int]:
        """Return what `rollback` goes back to: flushes so far, and micro-batches since."""
        return self._flushes, len(self._batches)

    def is_past(self, point: tuple[int, int]) -> bool:
        """Return whether metrics were flushed since a rollback point: it cannot be gone back to."""
        return self._flushes != point[0]

    def rollback(self, point: tuple[int, int]) -> None:
        """Drop the micro-batches since a rollback point: they are run again."""
        del self._batches[point[1] :]
        del self._blocks[-(-point[1] // _ROWS) :]

    def flush(self, trainer: SFTTrainer) -> None:
        """Append what was kept to ``trainer._metrics``. A collective: every rank has to call it.

        It is the one read of the device between two logs.
        """
        if not self._batches:
            return
        self._flushes += 1
        batches, self._batches = self._batches, []
        sums = torch.cat(self._blocks)[: len(batches)]
        self._blocks = []
        counts = torch.tensor([[batch.valid, batch.tokens] for batch in batches], dtype=torch.float32)
        table = torch.cat([sums, counts.to(sums.device, non_blocking=True)], dim=1)
        rows = trainer.accelerator.gather(table).view(-1, *table.shape).transpose(0, 1).tolist()
        for batch, of_ranks in zip(batches, rows, strict=True):
            entropy, correct, aux, valid, tokens = (
                sum(column) for column in zip(*of_ranks[: batch.ranks], strict=True)
            )
            lists = trainer._metrics[batch.mode]
            lists["entropy"].append(entropy / valid if valid > 0 else 0.0)
            lists["mean_token_accuracy"].append(correct / valid if valid > 0 else 0.0)
            if batch.mode == "train":
                trainer._total_train_tokens += int(tokens) // trainer._tp_size
            lists["num_tokens"] = [trainer._total_train_tokens]
            if batch.has_aux:
                lists["aux_loss"].append(aux / batch.ranks)


def counted_ranks(accelerator: Any) -> int:
    """Return the number of ranks that ``gather_for_metrics`` would count, for the batch just fetched."""
    state, ranks = accelerator.gradient_state, int(accelerator.num_processes)
    if ranks > 1 and state.end_of_dataloader and state.remainder > 0:
        return min(ranks, int(state.remainder))
    return ranks


class SettledAtRead:
    """An attribute of TRL's trainer to which `DeferredMetrics` adds: complete for whoever reads it between two logs.

    In one of several processes it is as of the last log: to settle the metrics is for all of them together.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        instance._fastpack_settle(alone=True)
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value
