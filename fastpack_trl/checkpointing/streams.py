"""Streams, copies and memory of a device, as the offload uses them.

The order of work is decided in `offload`, which calls no device by itself: tests put recording streams here, which
check the order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GIB = 2**30


class Streams:
    """A device with a compute stream and a copy stream. On the CPU everything runs at once and in order.

    Streams and events are opaque to the caller.

    Attributes:
        device: where activations live.
        copier: the only stream of copies, in both directions: they run in the order in which they were enqueued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library: Any = torch.get_device_module(device)
        self.copier = self._library.Stream(device)

    def compute(self) -> Any:
        """Return the current stream of the calling thread; call it each time, never keep it."""
        return self._library.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event that completes when the work enqueued on `stream` so far is done."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Let later work of `stream` start after `event`. The host does not wait."""
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target <- source`` on the copier; same shape, strides and dtype."""
        with self._library.stream(self.copier), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialized device memory that belongs to `compute()`: once freed, later work of it may reuse it.

        Raises:
            torch.OutOfMemoryError: no memory is left.
        """
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def host_memory(self, nbytes: int) -> Tensor:
        """Return uninitialized host memory, ``(nbytes,)`` uint8, pinned if there is a device.

        Raises:
            RuntimeError: the memory cannot be allocated or pinned.
        """
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
