"""The processes of a run, asked together for numbers of their hosts: a decision that all must take alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed


class Ranks:
    """All processes of a run. Each question waits until every one of them has asked it, in the same order.

    The answers go from host to host (gloo), past the device and its queue; where the run's own process group has no
    backend for the CPU, a second group is made with the first question.

    Args:
        count: of the processes; of one nobody is asked.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._group: Any = None
        self._asked = False

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes."""
        if self.count == 1:
            return list(values)
        if not self._asked:
            self._asked = True
            # None is the group that there is.
            self._group = None if "cpu:" in distributed.get_backend_config() else distributed.new_group(backend="gloo")
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
