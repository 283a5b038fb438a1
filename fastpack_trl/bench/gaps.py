"""A profile as figures: kernels, busy time, and the largest gaps with what the host was doing meanwhile.

The timeline is the device's. On the CPU, where there is none, it is that of the operators: a gap is then time in which
none ran, and the phases of the step tell what was going on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd import DeviceType

NO_OPERATOR = "no operator (Python)"
LABEL = "step: "
"""Prefix of the phases of a step in a profile."""
_COPIES = ("Memcpy", "Memset")
_OPERATORS = 10  # that a table shows


class Span(NamedTuple):
    """An event from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def find_gaps(timeline: Iterable[Span], host: Sequence[Span] = (), *, top: int = 10) -> list[dict[str, Any]]:
    """Return the longest stretches between events of `timeline`, the longest first, as plain data for JSON.

    ``[a: 0-2, b: 1-3, c: 7-8]`` has one gap: ``{"start": 3, "end": 7, "before": "b", "after": "c", "host": [...],
    "length": 4}``, where ``host`` has what the host did meanwhile, with microseconds; their sum is the gap.

    Args:
        timeline: may overlap (streams) and nest (operators), in any order.
        host: what names the host's work; overlapping and nested as well.
        top: gaps at most.
    """
    gaps: list[dict[str, Any]] = []
    last: Span | None = None  # of the events so far the one that ends last
    for span in sorted(timeline, key=lambda span: (span.start, span.end)):
        if last is not None and span.start > last.end:
            gap = {"start": last.end, "end": span.start, "before": last.name, "after": span.name}
            gaps.append({**gap, "length": span.start - last.end})
        if last is None or span.end > last.end:
            last = span
    longest = sorted(gaps, key=lambda gap: -gap["length"])[:top]
    return [
        {**gap, "host": [[*item] for item in host_during(gap["start"], gap["end"], host).items()]} for gap in longest
    ]


def host_during(start: float, end: float, host: Iterable[Span]) -> dict[str, float]:
    """Return the microseconds between `start` and `end` by what the host did, the longest first.

    At each moment the span counts that began last: of nested ones the innermost. What none covers is `NO_OPERATOR`.
    """
    inside = [span for span in host if span.start < end and span.end > start]
    edges = sorted({start, end, *(max(span.start, start) for span in inside), *(min(span.end, end) for span in inside)})
    found: dict[str, float] = {}
    inside.sort(key=lambda span: (span.start, -span.end))
    for low, high in itertools.pairwise(edges):
        running = [span for span in inside if span.start <= low and span.end >= high]
        name = running[-1].name if running else NO_OPERATOR
        found[name] = found.get(name, 0.0) + high - low
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
    """Return the figures of one step under torch.profiler, whose phases have a `LABEL`.

    The host is slower under the profiler, kernels are not.

    Returns:
        ``launches`` and ``busy_seconds`` (None on the CPU), ``gaps`` in the ``timeline`` that is named, and
        ``operators``: the host's that took longest by themselves.
    """
    events = list(profiler.events() or ())
    host = [event for event in events if event.device_type == DeviceType.CPU]
    own = [entry for entry in profiler.key_averages() if entry.self_cpu_time_total and not _is_annotation(entry)]
    own.sort(key=lambda entry: -entry.self_cpu_time_total)
    operators = [
        {"name": entry.key, "microseconds": entry.self_cpu_time_total, "calls": entry.count}
        for entry in own[:_OPERATORS]
    ]
    if device == "cuda":
        kernels = device_events(events)
        copies = sum(event.name.startswith(_COPIES) for event in kernels)
        return {
            "launches": {"kernels": len(kernels) - copies, "copies": copies, "micro_batches": micro_batches},
            "busy_seconds": busy_seconds(kernels),
            "timeline": "device",
            "gaps": find_gaps(map(_span, kernels), [*map(_span, host)]),
            "operators": operators,
        }
    ran = [event for event in host if not _is_annotation(event)]
    trains = Counter(event.thread for event in ran).most_common(1)
    return {
        "launches": None,
        "busy_seconds": None,
        "timeline": "operators of the thread that trains: nothing is launched on a CPU",
        "gaps": find_gaps(
            [_span(event) for event in ran if event.thread == trains[0][0]],
            [_span(event) for event in host if event.name.startswith(LABEL)],
        ),
        "operators": operators,
    }


def _span(event: Any) -> Span:
    return Span(str(event.name), float(event.time_range.start), float(event.time_range.end))


def gap_cells(gaps: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table's cells: length, neighbours, and the host's longest occupations."""
    cells = [["gap us", "after", "before", "the host meanwhile"]]
    for gap in gaps:
        host = ", ".join(f"{name} {length:,.0f}" for name, length in gap["host"][:2])
        cells.append([f"{gap['length']:,.0f}", _cut(gap["before"]), _cut(gap["after"]), host])
    return cells


def _cut(name: str) -> str:
    return name if len(name) <= 40 else name[:37] + "..."
