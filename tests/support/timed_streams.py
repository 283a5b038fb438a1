"""Streams that time their copies, for tests on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack_trl.checkpointing.streams import CudaStreams


class TimedCudaStreams(CudaStreams):
    """`CudaStreams` that also times copies and the stalls of the compute stream.

    A stall is the time between two events on the compute stream with nothing but a wait between them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: list[tuple[Any, Any]] = []
        self._stalls: list[tuple[Any, Any]] = []

    def _mark(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if stream == self.copier:
            super().wait(stream, event)
            return
        before = self._mark(stream)
        super().wait(stream, event)
        self._stalls.append((before, self._mark(stream)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        before = self._mark(self.copier)
        super().copy(target, source)
        self._copies.append((before, self._mark(self.copier)))

    def take(self) -> tuple[float, float]:
        """Return the seconds of copies, and those for which compute stood still for them, since the last call.

        Waits for the device. A wait that finds its event done costs a few microseconds, counted as a stall too.
        """
        torch.cuda.synchronize(self.device)
        copies, stalls = (
            sum(before.elapsed_time(after) for before, after in pairs) / 1e3 for pairs in (self._copies, self._stalls)
        )
        self._copies, self._stalls = [], []
        return copies, stalls
