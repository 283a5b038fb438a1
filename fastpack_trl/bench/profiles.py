"""A profile as figures: launches, kernels, waits of the host, and the time in which the device is busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphL")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: ``(0, 2), (1, 3), (5, 6)`` -> 4. Streams overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def device_events(events: Iterable[Any]) -> list[Any]:
    """Return the kernels and copies of a profile."""
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    return [event for event in on_device if not getattr(event, "is_user_annotation", False)]


def profile_figures(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Return, per step of `steps`, calls that launch work, kernels, waits of the host, and the device's busy time.

    The idle share of a step is 1 - ``busy_seconds`` / its seconds, timed without the profiler.
    """
    kernels = device_events(events)
    calls = [event.name for event in events if event.device_type == DeviceType.CPU]
    return {
        "launches": sum(name.startswith(_LAUNCHES) for name in calls) / steps,
        "kernels": len(kernels) / steps,
        "waits": sum(name.endswith("Synchronize") for name in calls) / steps,
        "busy_seconds": covered((event.time_range.start, event.time_range.end) for event in kernels) / 1e6 / steps,
    }
