"""Device memory: the bytes that can still be allocated, and the release of unused memory."""

from __future__ import annotations

import gc

import torch


def free_memory() -> None:
    """Release unused device memory, so that a failed side leaves nothing to the next one."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def allocatable(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a CUDA device.

    They are free on the device or in torch's cache, and within `torch.cuda.set_per_process_memory_fraction`.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)
