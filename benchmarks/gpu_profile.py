"""Work of device and host in some steps, from torch.profiler: kernels, busy time, host time beside waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastpack_trl.bench.gaps import covered

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of the runtime in which the host does nothing but wait."""


class GpuProfile:
    """A profile between `start` and `stop`, both to be called when the device has finished its work."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._window = 0.0

    def start(self) -> None:
        self._profile.start()

    def stop(self, seconds: float) -> None:
        """End the profile, whose window was that many seconds of the host."""
        self._profile.stop()
        self._window = seconds

    def figures(self, micro_steps: int) -> dict[str, Any]:
        """Return, per micro-step, kernels launched, busy seconds of the device, host microseconds outside of waits.

        The host is slower under the profiler, on all sides alike.
        """
        from torch.autograd import DeviceType

        events: Iterable[Any] = self._profile.events() or ()
        device = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        kernels = [event for event in device if not event.name.startswith(("Memcpy", "Memset"))]
        waits = [event for event in events if event.device_type == DeviceType.CPU and event.name in _WAITS]
        spans = {
            "device": covered((event.time_range.start, event.time_range.end) for event in device),
            "waits": covered((event.time_range.start, event.time_range.end) for event in waits),
        }
        return {
            "micro_steps": micro_steps,
            "kernels_per_micro_step": len(kernels) / micro_steps,
            "copies_per_micro_step": (len(device) - len(kernels)) / micro_steps,
            "waits_per_micro_step": len(waits) / micro_steps,
            "busy_seconds_per_micro_step": spans["device"] / 1e6 / micro_steps,
            "host_microseconds_per_micro_step": (self._window * 1e6 - spans["waits"]) / micro_steps,
        }


def profile_figures(events: Any, steps: int) -> dict[str, float]:
    """Return, per step of `steps`, calls that launch work, kernels, waits of the host, and the device's busy time."""
    from torch.autograd import DeviceType

    device = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    launches = [
        e
        for e in events
        if e.device_type == DeviceType.CPU and e.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphL"))
    ]
    waits = [e for e in events if e.device_type == DeviceType.CPU and e.name.endswith("Synchronize")]
    busy = covered((e.time_range.start, e.time_range.end) for e in device) / 1e6
    return {
        "launches": len(launches) / steps,
        "kernels": len(device) / steps,
        "waits": len(waits) / steps,
        "busy_seconds": busy / steps,
    }
