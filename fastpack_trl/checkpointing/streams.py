"""Streams, copies and memory of a device, as the offload uses them.

The order of work is decided in `offload`, which knows nothing of CUDA; so it also runs on the CPU, and in tests under
recording streams that check the order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GIB = 2**30


class HostStreams:
    """A device with a compute stream and a copy stream; here the CPU, where everything runs at once and in order.

    Streams and events are opaque to the caller.

    Attributes:
        device: where activations live.
        copier: the only stream of copies, in both directions: they run in the order in which they were enqueued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copier: Any = "copy"

    def compute(self) -> Any:
        """Return the current stream of the calling thread; call it each time, never keep it."""
        return "compute"

    def record(self, stream: Any) -> Any:
        """Return an event that completes when the work enqueued on `stream` so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let later work of `stream` start after `event`. The host does not wait."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target <- source`` on the copier; same shape, strides and dtype."""
        with torch.no_grad():
            target.copy_(source)

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialized device memory that belongs to `compute()`: once freed, later work of it may reuse it.

        Raises:
            torch.OutOfMemoryError: no memory is left.
        """
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def host_memory(self, nbytes: int) -> Tensor:
        """Return uninitialized host memory, ``(nbytes,)`` uint8, pinned if there is an accelerator.

        Raises:
            RuntimeError: the memory cannot be allocated or pinned.
        """
        return torch.empty(nbytes, dtype=torch.uint8)


class CudaStreams(HostStreams):
    """A CUDA device: the copy engines work on a stream of their own while kernels run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
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

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
