"""Streams, copies and host memory of a device, as the offloader asks for them.

The order of work is decided in `offloader`, which knows nothing of CUDA; so it can be run on the CPU, and under a
recording stand-in that checks the order itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

GIB = 2**30
_LEAST_CLASS = 4096
_STEPS = 8  # size classes per power of two: at most 1/8 of a buffer is unused
_MOST_PER_SLAB = 8


class HostStreams:
    """A device with a compute stream and a copy stream; here the host, where everything runs at once, in order.

    Streams and events are opaque to the caller.

    Attributes:
        device: where activations live.
        copier: the one stream of all copies, in both directions: copies run in the order in which they were asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copier: Any = "copy"

    def compute(self) -> Any:
        """Return the stream that the calling thread's kernels go to now; asked for each time, never kept."""
        return "compute"

    def record(self, stream: Any) -> Any:
        """Return an event that is done when everything asked of `stream` so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let work that `stream` gets from now on start after `event`. The host does not wait."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target <- source`` on the copier; same shape, strides and dtype."""
        with torch.no_grad():
            target.copy_(source)

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised device memory that belongs to `compute()`: freed, it is used again by later work of it.

        Raises:
            torch.OutOfMemoryError: none left.
        """
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return uninitialised host memory as ``(nbytes,)`` uint8; pinned only beside an accelerator.

        Raises:
            RuntimeError: refused; what torch raises for pinned as for pageable memory.
        """
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_host_memory(self) -> None:
        """Give unused pinned memory back to the system, where torch can."""


class CudaStreams(HostStreams):
    """A CUDA device: copies on a stream of their own, by the copy engines, beside the kernels."""

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

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def free_host_memory(self) -> None:
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.12
        if empty is not None:
            empty()


def host_copy_seconds(device: torch.device, nbytes: int = 2**26) -> Callable[[int], float]:
    """Return the seconds per copy from pinned host memory, from one short measurement on `device`."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    rate = nbytes / min(times)
    return lambda count: count / rate


def size_class(nbytes: int) -> int:
    """Return the smallest buffer size for `nbytes`: eight sizes per power of two, at least a page."""
    if nbytes <= _LEAST_CLASS:
        return _LEAST_CLASS
    step = (1 << ((nbytes - 1).bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


def pinned_size(nbytes: int) -> int:
    """Return the bytes that torch's pinned allocator takes from the system for `nbytes`: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def buffers_per_slab(nbytes: int, budget: int) -> int:
    """Return how many buffers of `nbytes` to pin in one piece to lose least to `pinned_size`; 0 where none fits.

    >>> buffers_per_slab(3 * 2**28, 8 * 2**30)  # 5 x 0.75 GiB in 4 GiB, not 1 x 0.75 in 1
    5
    """
    fitting = [n for n in range(1, _MOST_PER_SLAB + 1) if pinned_size(n * nbytes) <= budget]
    return min(fitting, key=lambda n: (pinned_size(n * nbytes) / (n * nbytes), n), default=0)


@dataclass(eq=False, slots=True)
class Slab:
    """Host memory asked for in one piece, cut into buffers of one size."""

    buffer_bytes: int
    taken_bytes: int
    """From the system, rounding of the pinned allocator included."""
    pinned: bool
    free: list[HostBuffer] = field(default_factory=list)
    buffers: int = 0

    @property
    def idle(self) -> bool:
        return len(self.free) == self.buffers


@dataclass(eq=False, slots=True)
class HostBuffer:
    """One buffer of a slab; at any time it is leased to one packed tensor, or free."""

    data: Tensor
    """``(buffer_bytes,)`` uint8."""
    slab: Slab


class HostUse(NamedTuple):
    """Bytes of host memory. `leased` is back at 0 when no graph is alive."""

    leases: int = 0
    leased: int = 0
    most_leased: int = 0
    pinned: int = 0
    pageable: int = 0

    def __str__(self) -> str:
        text = f"{self.most_leased / GIB:.2f} GiB used, {self.pinned / GIB:.2f} GiB pinned"
        return f"{text}, {self.pageable / GIB:.2f} GiB pageable" if self.pageable else text


class HostPool:
    """Buffers that are leased and given back. Not thread-safe: `Offloader` holds its lock around each call.

    A free buffer may be written again at once although a copy out of it is still queued: all copies of an offloader
    run on one stream, in the order in which they were asked for.

    Args:
        budget_bytes: most pinned memory to take from the system.
        say: called with a sentence when something falls back; the receiver says each once.
    """

    def __init__(self, streams: HostStreams, budget_bytes: int, say: Callable[[str], None]) -> None:
        self._streams = streams
        self._budget = budget_bytes
        self._say = say
        self._pins = True
        self._slabs: list[Slab] = []
        self._leases = self._leased = self._most_leased = 0

    def acquire(self, nbytes: int) -> HostBuffer | None:
        """Lease a buffer of at least `nbytes`; None where the host has no memory left, which is said."""
        buffer = self._find(nbytes) or self._pin(nbytes) or self._page(nbytes)
        if buffer is None:
            return None
        self._leases += 1
        self._leased += buffer.slab.buffer_bytes
        self._most_leased = max(self._most_leased, self._leased)
        return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Give a buffer back."""
        assert buffer not in buffer.slab.free, "a buffer was given back twice"
        buffer.slab.free.append(buffer)
        self._leases -= 1
        self._leased -= buffer.slab.buffer_bytes

    @property
    def use(self) -> HostUse:
        taken = [sum(slab.taken_bytes for slab in self._slabs if slab.pinned is pinned) for pinned in (True, False)]
        return HostUse(self._leases, self._leased, self._most_leased, *taken)

    def trim(self) -> None:
        """Drop what is not leased."""
        idle = [slab for slab in self._slabs if slab.idle]
        self._slabs = [slab for slab in self._slabs if not slab.idle]
        for slab in idle:
            slab.free.clear()  # slab and buffer refer to each other
        if idle:
            self._streams.free_host_memory()

    def _find(self, nbytes: int) -> HostBuffer | None:
        """Return the smallest free buffer that is not more than twice too large, pinned before pageable."""
        most = 2 * size_class(nbytes)
        fitting = [slab for slab in self._slabs if slab.free and nbytes <= slab.buffer_bytes <= most]
        best = min(fitting, key=lambda slab: (not slab.pinned, slab.buffer_bytes), default=None)
        return None if best is None else best.free.pop()

    def _pin(self, nbytes: int) -> HostBuffer | None:
        if not self._pins:
            return None
        each = size_class(nbytes)
        count = buffers_per_slab(each, self._budget - self.use.pinned)
        if not count:
            self.trim()  # batches that grow leave buffers behind that are too small for all that comes
            count = buffers_per_slab(each, self._budget - self.use.pinned)
        if not count:
            self._say(
                f"offload_budget_gib={self._budget / GIB:.3g} of pinned memory is used up: pageable memory from here "
                "on, whose copies are slower and hold up the host"
            )
            return None
        try:
            return self._cut(each, count, pinned=True)
        except (RuntimeError, MemoryError) as error:
            self._pins = False
            self._say(f"pinned memory was refused ({_first_line(error)}): pageable memory from here on")
            return None

    def _page(self, nbytes: int) -> HostBuffer | None:
        try:
            return self._cut(size_class(nbytes), 1, pinned=False)
        except (RuntimeError, MemoryError) as error:
            self._say(f"the host has no memory left ({_first_line(error)}): further layer inputs stay on the device")
            return None

    def _cut(self, each: int, count: int, *, pinned: bool) -> HostBuffer:
        """Lease the last buffer of a new slab."""
        memory = self._streams.host_memory(count * each, pinned=pinned)
        slab = Slab(each, pinned_size(count * each) if pinned else each, pinned, buffers=count)
        slab.free = [HostBuffer(data, slab) for data in memory.split(each)]
        self._slabs.append(slab)
        return slab.free.pop()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
