"""The gap finder: a pure function of events, on drawn ones and on a real profile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.bench.gaps import NO_OPERATOR, Span, covered, find_gaps, gap_cells

_SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: Span("e", pair[0], pair[0] + pair[1])),
    max_size=12,
)


def _overlap(first: Span | tuple[float, float], low: float, high: float) -> float:
    start, end = first[-2:]
    return max(0.0, min(float(end), high) - max(float(start), low))


@settings(max_examples=60, deadline=None)
@given(timeline=_SPANS, host=_SPANS)
def test_gaps_and_events_fill_the_timeline_and_never_meet(timeline: list[Span], host: list[Span]) -> None:
    gaps = find_gaps(timeline, host, top=99)
    whole = max((span.end for span in timeline), default=0.0) - min((span.start for span in timeline), default=0.0)
    assert sum(gap["length"] for gap in gaps) + covered((span.start, span.end) for span in timeline) == whole
    assert all(gap["length"] == gap["end"] - gap["start"] > 0 for gap in gaps)
    assert [gap["length"] for gap in gaps] == sorted((gap["length"] for gap in gaps), reverse=True)
    for gap in gaps:
        start, end = gap["start"], gap["end"]
        assert all(_overlap(span, start, end) == 0 for span in timeline)
        assert sum(length for _, length in gap["host"]) == pytest.approx(gap["length"])
        idle = dict(gap["host"]).get(NO_OPERATOR, 0.0)
        clipped = [(max(s.start, start), min(s.end, end)) for s in host if _overlap(s, start, end)]
        assert idle == pytest.approx(gap["length"] - covered(clipped))
    assert find_gaps(timeline, host, top=2) == gaps[:2]


def test_a_gap_names_its_neighbours_and_what_the_host_did() -> None:
    kernels = [Span("c", 70, 80), Span("a", 0, 20), Span("b", 10, 30)]
    host = [Span("outer", 25, 60), Span("wait", 40, 50)]
    (gap,) = find_gaps(kernels, host)
    assert (gap["start"], gap["end"], gap["before"], gap["after"]) == (30, 70, "b", "c")
    assert gap["host"] == [["outer", 20], ["wait", 10], [NO_OPERATOR, 10]]
    assert gap_cells([gap])[1] == ["40", "b", "c", "outer 20, wait 10"]
    assert find_gaps([]) == []


def test_the_gaps_of_a_real_profile_are_its_time_outside_of_operators() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            weight = torch.randn(16, 16, requires_grad=True)
            (weight @ weight).sum().backward()
            sum(range(20_000))  # the host, without an operator
    events = [event for event in profile.events() if not event.is_user_annotation]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    gaps = find_gaps(spans, top=10_000)
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    busy = covered((span.start, span.end) for span in spans)
    assert sum(gap["length"] for gap in gaps) == pytest.approx(whole - busy, abs=1e-3)
