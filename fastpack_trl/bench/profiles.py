"""A profile as figures: kernels, busy time, and the operators that the host was longest in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

LABEL = "step: "
"""Prefix of the phases of a step in a profile."""
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphL")
_COPIES = ("Memcpy", "Memset")
_OPERATORS = 10  # that a table shows


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
    return [event for event in on_device if not _is_annotation(event)]


def _is_annotation(event: Any) -> bool:
    return bool(getattr(event, "is_user_annotation", False))


def busy_seconds(kernels: Iterable[Any]) -> float:
    """Return the seconds in which at least one of some `device_events` ran."""
    return covered((event.time_range.start, event.time_range.end) for event in kernels) / 1e6


def step_profile(profiler: Any, device: str, micro_batches: int) -> dict[str, Any]:
    """Return the figures of one step under torch.profiler: the host is slower under it, kernels are not.

    Returns:
        ``launches`` and ``busy_seconds`` (None on the CPU), and ``operators``: the host's that took longest by
        themselves.
    """
    own = [entry for entry in profiler.key_averages() if entry.self_cpu_time_total and not _is_annotation(entry)]
    own.sort(key=lambda entry: -entry.self_cpu_time_total)
    figures: dict[str, Any] = {
        "launches": None,
        "busy_seconds": None,
        "operators": [
            {"name": entry.key, "microseconds": entry.self_cpu_time_total, "calls": entry.count}
            for entry in own[:_OPERATORS]
        ],
    }
    if device == "cuda":
        kernels = device_events(profiler.events() or ())
        copies = sum(event.name.startswith(_COPIES) for event in kernels)
        figures["launches"] = {"kernels": len(kernels) - copies, "copies": copies, "micro_batches": micro_batches}
        figures["busy_seconds"] = busy_seconds(kernels)
    return figures


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
        "busy_seconds": busy_seconds(kernels) / steps,
    }
