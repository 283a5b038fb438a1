"""Device memory: what can still be allocated, the peak of a step, and unused memory given back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_memory(device: str) -> None:
    """Give unused device memory back, so that the next side does not run in what a failed one left."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def allocatable(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a CUDA device.

    They are free there or in torch's cache, and within `torch.cuda.set_per_process_memory_fraction`, which a user of a
    shared device sets.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


class PeakMemory:
    """Bytes of device memory that a step needs at most, and those that lie there before it; None on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = int(torch.cuda.memory_allocated())

    def read(self) -> dict[str, int] | None:
        """Return ``{"peak_bytes", "before_bytes"}`` since construction, allocated; None on the CPU.

        What torch holds beside, caches and CUDA graphs, is that of all that ran in the process.
        """
        if self.before is None:
            return None
        import torch

        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "before_bytes": self.before}
