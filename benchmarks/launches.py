"""Kernel launches of one call and how long the device worked on them, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launches:
    """``Launches(kernels=812, copies=9, busy_seconds=0.041)``."""

    kernels: int
    copies: int
    """Copies and fills by the device's own engine."""
    busy_seconds: float
    """Sum over kernels and copies: with one stream, the time the device was not idle."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_launches(call: Callable[[], Any], device: str) -> Launches | None:
    """Run `call` once under the profiler; None on the CPU, where nothing is launched."""
    if device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = [event for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(event.count for event in events if event.key.startswith(("Memcpy", "Memset")))
    return Launches(
        kernels=sum(event.count for event in events) - copies,
        copies=copies,
        busy_seconds=sum(event.self_device_time_total for event in events) / 1e6,
    )
