"""The processes of a run, asked together from host to host: what all must decide alike, and the failure of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from fastpack_trl.errors import RankFailedError, describe

PATIENCE = 30.0
"""Seconds that a process waits, which failed inside of a collective, for the others to fail too: they do so at once."""
_REASON_BYTES = 512


class Ranks:
    """All processes of a run. Each question waits until every one of them has asked it, in the same order.

    The answers go through a process group of their own (gloo), made with the first question: past the device and its
    queue, and apart from what a process does in the run's collectives meanwhile.

    Args:
        count: of the processes; of one nobody is asked.
        timeout: after which a question that others do not ask is an error.
    """

    def __init__(self, count: int, timeout: timedelta | None = None) -> None:
        self.count = count if distributed.is_available() and distributed.is_initialized() else 1
        self._timeout = timeout
        self._made: Any = None

    @property
    def _group(self) -> Any:
        if self._made is None:
            self._made = distributed.new_group(backend="gloo", timeout=self._timeout)
        return self._made

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes."""
        if self.count == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._group)
        answers: list[float] = found.tolist()
        return answers

    def least(self, values: Sequence[float]) -> list[float]:
        """Return the smallest of each value over all processes."""
        return [-value for value in self.most([-value for value in values])]

    def all(self, here: bool) -> bool:
        """Return whether it holds in every process."""
        return self.least([float(here)]) == [1.0]

    def reason(self, own: str, patience: float | None = None) -> str:
        """Return `own`, else the first reason of another process, after its rank; empty where none has one.

        Args:
            own: empty where this process has none.
            patience: seconds after which the question is an error; None: those of the group.

        Raises:
            RuntimeError: the others did not ask in time.
        """
        if self.count == 1:
            return own
        text = own.encode()[:_REASON_BYTES]
        said = torch.zeros(self.count, _REASON_BYTES, dtype=torch.uint8)
        said[distributed.get_rank(), : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        if patience is not None:
            # Of the operation: one whose `wait` alone was given up holds the end of the process for the group's time.
            options.timeout = timedelta(seconds=patience)
        self._group.allreduce([said], options).wait()
        theirs = (f"rank {rank}: {text}" for rank, text in enumerate(map(_text, said)) if text)
        return own or next(theirs, "")

    def first_reason(self, why_not: Callable[[], str]) -> str:
        """Return the reason of `why_not` in this process, else that of another; see `reason`.

        What it raises here is a reason to the others, and raised once they have it.
        """
        try:
            own = why_not()
        except RankFailedError:
            raise
        except Exception as error:
            self.reason(_said(error))
            raise
        return self.reason(own)

    @contextmanager
    def failing_together(self, patience: float | None = None) -> Iterator[None]:
        """Let every process leave the context with an exception where one does.

        Args:
            patience: seconds that a process which failed waits for the others. They may be inside of a collective that
                it has left, where nobody can reach them. None: there is no collective inside.

        Raises:
            RuntimeError: another process failed, and this one did not; names its rank and its reason.
            RankFailedError: this process failed, and the others wait for it: the run has to end.
        """
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            try:
                self.reason(_said(error), patience)
            except RuntimeError:
                raise RankFailedError(
                    f"rank {distributed.get_rank()}: {_said(error)}; the other processes wait for this one in a "
                    "collective that it has left, so the run ends"
                ) from error
            raise
        theirs = self.reason("")
        if theirs:
            raise RuntimeError(theirs)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {describe(error)}"


def _text(sent: Tensor) -> str:
    return bytes(sent.tolist()).rstrip(b"\0").decode(errors="ignore")
