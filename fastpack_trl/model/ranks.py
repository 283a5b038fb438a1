"""The processes of a run: joint decisions from host to host, and the failure of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from fastpack_trl.errors import RankFailedError, describe

FAILURE_GRACE_SECONDS = 30.0
"""Seconds for which a process that failed in a collective waits for the others, which fail at once."""
_REASON_BYTES = 512


class Ranks:
    """Collectives for joint decisions. Every process must make the same calls in the same order.

    They use a process group of their own (gloo), made at the first call: past the device and its queue, and apart from
    the run's collectives. A single process makes none; `timeout` is that of a call that other processes do not join.
    """

    def __init__(self, count: int, timeout: timedelta | None = None) -> None:
        self.count = count if distributed.is_available() and distributed.is_initialized() else 1
        self._timeout, self._group = timeout, None

    def _reduce(self, values: torch.Tensor, timeout: float | None = None) -> torch.Tensor:
        """Take the maximum of each value over all processes, in place."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self._timeout)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        if timeout is not None:
            # Set on the operation: one whose `wait` alone times out delays the exit by the group's timeout.
            options.timeout = timedelta(seconds=timeout)
        group: Any = self._group
        group.allreduce([values], options).wait()
        return values

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all processes."""
        if self.count == 1:
            return list(values)
        maxima: list[float] = self._reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        return maxima

    def all_min(self, values: Sequence[float]) -> list[float]:
        """Return the minimum of each value over all processes."""
        return [-value for value in self.all_max([-value for value in values])]

    def all(self, here: bool) -> bool:
        """Return whether `here` holds in every process."""
        return self.all_min([float(here)]) == [1.0]

    def reason(self, own: str, patience: float | None = None) -> str:
        """Return `own`, else the first reason of another process, after its rank; empty if none has one.

        Raises:
            RuntimeError: other processes did not call within `patience` seconds, or the timeout of the group.
        """
        if self.count == 1:
            return own
        text = own.encode()[:_REASON_BYTES]
        texts = torch.zeros(self.count, _REASON_BYTES, dtype=torch.uint8)
        texts[distributed.get_rank(), : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = self._reduce(texts, patience).tolist()
        reasons = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows)
        return own or next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")

    def first_reason(self, why_not: Callable[[], str]) -> str:
        """Return the reason of `why_not` in this process, else that of another; see `reason`.

        An exception in `why_not` is a reason to the others, and is raised once they have it.
        """
        with self._failure_told(None):
            own = why_not()
        return self.reason(own)

    @contextmanager
    def propagate_failures(self, patience: float | None = None) -> Iterator[None]:
        """Leave the context with an exception in every process if one raises.

        Args:
            patience: seconds that a process which failed waits for the others, if they may be in a collective that it
                has left, where nobody can reach them. None: the context has no collective.

        Raises:
            RuntimeError: another process failed, and this one did not; names its rank and its reason.
            RankFailedError: this process failed, and the others wait for it: the run has to end.
        """
        with self._failure_told(patience):
            yield
        if theirs := self.reason(""):
            raise RuntimeError(theirs)

    @contextmanager
    def _failure_told(self, patience: float | None) -> Iterator[None]:
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            summary = f"{type(error).__name__}: {describe(error)}"
            try:
                self.reason(summary, patience)
            except RuntimeError:
                raise RankFailedError(
                    f"rank {distributed.get_rank()}: {summary}; the other processes wait for this one in a collective "
                    "that it has left, so the run ends"
                ) from error
            raise
