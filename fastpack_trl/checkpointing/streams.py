"""Streams, events and copies of a device, as the offloader asks for them, behind one small protocol.

The order of work is decided in `offloader`, which knows nothing of CUDA; so it can be run on the CPU, and under a
recording stand-in that checks the order itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """A device with a compute stream and a copy stream. Streams and events are opaque to the caller.

    Attributes:
        device: where activations live.
        copier: the one stream of all copies, in both directions: copies run in the order in which they were asked for.
    """

    device: torch.device
    copier: Any

    def compute(self) -> Any:
        """Return the stream that the calling thread's kernels go to now; asked for each time, never kept."""

    def record(self, stream: Any) -> Any:
        """Return an event that is done when everything asked of `stream` so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let work that `stream` gets from now on start after `event`. The host does not wait."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target <- source`` on the copier; same shape, strides and dtype."""

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised device memory that belongs to `compute()`: freed, it is used again by later work of it.

        Raises:
            torch.OutOfMemoryError: none left.
        """

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return uninitialised host memory as ``(nbytes,)`` uint8.

        Raises:
            RuntimeError: refused; what torch raises for pinned as for pageable memory.
        """

    def free_host_memory(self) -> None:
        """Give unused pinned memory back to the system, where torch can."""


class CudaStreams:
    """A CUDA device: copies on a stream of their own, by the copy engines, beside the kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copier = torch.cuda.Stream(device)

    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copier), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def free_host_memory(self) -> None:
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.12
        if empty is not None:
            empty()


@dataclass(slots=True)
class _Times:
    """Pairs of timing events; read after a synchronise."""

    copies: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class TimedCudaStreams(CudaStreams):
    """`CudaStreams` that also times copies and the stalls of the compute stream; for measurements.

    A stall is the time between two events on the compute stream with nothing but a wait between them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._times = _Times()

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
        self._times.waits.append((before, self._mark(stream)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        before = self._mark(self.copier)
        super().copy(target, source)
        self._times.copies.append((before, self._mark(self.copier)))

    def take(self) -> tuple[float, float]:
        """Return the seconds of copies, and those for which compute stood still for them, since the last call.

        Waits for the device. A wait that finds its event done costs a few microseconds, counted as a stall too.
        """
        torch.cuda.synchronize(self.device)
        times, self._times = self._times, _Times()

        def total(pairs: list[tuple[Any, Any]]) -> float:
            return sum(before.elapsed_time(after) for before, after in pairs) / 1e3

        return total(times.copies), total(times.waits)


class HostStreams:
    """No device: everything runs at once, in the order of the calls. The same code path, for tests on the CPU."""

    copier = "copy"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def compute(self) -> Any:
        return "compute"

    def record(self, stream: Any) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Do nothing: all is done."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)  # pinning needs an accelerator

    def free_host_memory(self) -> None:
        """Do nothing: nothing is kept."""
