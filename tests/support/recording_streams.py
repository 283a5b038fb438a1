"""A device without a device: streams that record what is asked of them, and find what nothing orders.

Each stream has a clock of what it has done and, through events, of what it has waited for (vector clocks). Two accesses
to one piece of memory, one of them a write, must be ordered by them; else a real device may run them in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

COMPUTE, COPIER = "compute", "copy"


class RaceError(AssertionError):
    """Two accesses that nothing orders."""


@dataclass
class _History:
    writes: list[tuple[str, int]] = field(default_factory=list)
    reads: list[tuple[str, int]] = field(default_factory=list)


class RecordingStreams:
    """A `Streams` whose device is the CPU and whose memory is handed out again as soon as nothing refers to it.

    Attributes:
        device_blocks: most blocks of device memory in use at a time, new or used again; None: no limit.
        most_blocks: blocks in use after the allocation that left most of them; a test sets it back to 0.
    """

    copier = COPIER

    def __init__(self, *, device_blocks: int | None = None, pinned_bytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.device_blocks, self.pinned_bytes = device_blocks, pinned_bytes
        self.most_blocks = 0
        self.clocks = {name: {COMPUTE: 0, COPIER: 0} for name in (COMPUTE, COPIER)}
        self._history: dict[int, _History] = {}
        self._blocks: list[Tensor] = []
        self.log: list[str] = []

    def compute(self) -> str:
        return COMPUTE

    def record(self, stream: str) -> dict[str, int]:
        return dict(self.clocks[stream])

    def wait(self, stream: str, event: dict[str, int]) -> None:
        mine = self.clocks[stream]
        for name, done in event.items():
            mine[name] = max(mine[name], done)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        self.use(COPIER, source, write=False)
        self.use(COPIER, target, write=True)
        target.copy_(source)

    def use(self, stream: str, tensor: Tensor, *, write: bool) -> None:
        """An access by the next piece of work of `stream`; raises where an earlier one is not ordered before it."""
        clock = self.clocks[stream]
        clock[stream] += 1
        history = self._history.setdefault(tensor.data_ptr(), _History())
        for other, done in history.writes + (history.reads if write else []):
            if done > clock[other]:
                raise RaceError(f"{'write' if write else 'read'} on {stream} is not after an access on {other}")
        (history.writes if write else history.reads).append((stream, clock[stream]))
        if write:
            history.writes, history.reads = history.writes[-1:], []

    def device_memory(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """The first block that nobody refers to, as a caching allocator does; old contents poisoned."""
        live = self.live_blocks
        if self.device_blocks is not None and live >= self.device_blocks:
            raise torch.OutOfMemoryError(f"{live} blocks are in use")
        self.most_blocks = max(self.most_blocks, live + 1)
        nbytes = int(torch.Size(shape).numel()) * torch.empty((), dtype=dtype).element_size()
        for block in self._blocks:
            if block.numel() >= nbytes and _references(block) == 1:
                break
        else:
            block = torch.empty(max(nbytes, 64), dtype=torch.uint8)
            self._blocks.append(block)
        block.fill_(0xFF)
        return block.view(dtype).as_strided(shape, stride)

    @property
    def live_blocks(self) -> int:
        return sum(_references(block) > 1 for block in self._blocks)

    def host_memory(self, nbytes: int) -> Tensor:
        if self.pinned_bytes is not None and nbytes > self.pinned_bytes:
            raise RuntimeError(f"CUDA error: out of memory\n{nbytes} bytes")
        return torch.empty(nbytes, dtype=torch.uint8)


def _references(block: Tensor) -> int:
    """Tensors that show the storage of `block`."""
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata) - 1
