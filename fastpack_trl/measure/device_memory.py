"""Device memory: what can still be allocated, and unused memory given back."""

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
