"""One optimizer step under torch.profiler: a Chrome trace, kernels and busy time, and the largest gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastpack_trl.bench.gaps import Span, covered, find_gaps, self_times
from fastpack_trl.bench.step_watch import LABEL, StepWatch

_COPIES = ("Memcpy", "Memset")


class StepProfile:
    """A profile of the step that runs inside of `around`.

    Args:
        watch: names its phases in the trace.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, watch: StepWatch, device: str) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._watch, self._device = watch, device

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Profile the step that runs inside, in the thread that trains."""
        self._watch.labelled = True
        try:
            with self._profile, self._watch.around_step():
                yield
        finally:
            self._watch.labelled = False

    def figures(self, micro_batches: int) -> dict[str, Any]:
        """Return ``launches`` (None on the CPU), ``busy_seconds``, ``gaps`` and ``operators`` (the host's).

        The host is slower under the profiler, kernels are not.
        """
        from torch.autograd import DeviceType

        events = list(self._profile.events() or ())
        host = [event for event in events if event.device_type == DeviceType.CPU]
        kernels = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        phases = [span for span in map(_span, host) if span.name.startswith(LABEL)]
        operators = [event for event in host if not getattr(event, "is_user_annotation", False)]
        threads: dict[int, list[Span]] = {}
        for event in operators:
            threads.setdefault(event.thread, []).append(_span(event))
        busiest = max(threads.values(), key=len, default=[])
        out: dict[str, Any] = {"launches": None, "busy_seconds": None, "operators": self_times(busiest)}
        if self._device == "cuda":
            copies = sum(event.name.startswith(_COPIES) for event in kernels)
            busy = covered((event.time_range.start, event.time_range.end) for event in kernels) / 1e6
            launches = {"kernels": len(kernels) - copies, "copies": copies, "micro_batches": micro_batches}
            everything = [_span(event) for event in host]
            return out | {
                "launches": launches,
                "busy_seconds": busy,
                "timeline": "device",
                "gaps": [gap.to_dict() for gap in find_gaps(map(_span, kernels), everything)],
            }
        return out | {
            "timeline": "operators of the thread that trains: nothing is launched on a CPU",
            "gaps": [gap.to_dict() for gap in find_gaps(busiest, phases)],
        }

    def write_trace(self, file: Path) -> None:
        """Write a file for chrome://tracing or https://ui.perfetto.dev."""
        self._profile.export_chrome_trace(str(file))


def _span(event: Any) -> Span:
    return Span(str(event.name), float(event.time_range.start), float(event.time_range.end))
