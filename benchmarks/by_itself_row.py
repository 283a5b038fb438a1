"""One row of `benchmarks.by_itself`: sides that differ in one thing, and what they gain beside what arithmetic says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.arithmetic import Saved, sound
from benchmarks.cases import Pass as Marks
from fastpack_trl.measure.intervals import ratio_summary, summary
from fastpack_trl.measure.rounds import Rounds
from fastpack_trl.measure.timing import Clock

PARTS = ("forward", "backward", "seconds")


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one forward and backward pass, its loss, and the device's memory at most, in bytes."""

    forward: float
    backward: float
    seconds: float
    loss: float
    peak: int | None


def passes_of(found: Rounds[tuple[Marks, Any]], clock: Clock) -> dict[str, list[Pass]]:
    """Return the passes of each side that went through, from their marks and losses; the device has finished."""
    return {name: [_read(marks, loss, clock) for marks, loss in each] for name, each in found.results.items()}


def _read(marks: Marks, loss: Any, clock: Clock) -> Pass:
    start, middle, end = marks.start, marks.middle, marks.end
    peak = None if marks.memory is None else marks.memory["peak_bytes"]
    parts = clock.seconds(start, middle), clock.seconds(middle, end), clock.seconds(start, end)
    return Pass(*parts, float(loss), peak)


def row_of(
    passes: Mapping[str, Sequence[Pass]], failed: Mapping[str, str], off: str, on: str, predicted: Saved,
    parts: Mapping[str, Any], tolerance: float,
) -> dict[str, Any]:  # fmt: skip
    """Return a row as plain data.

    Args:
        passes: of each side, round by round.
        failed: reasons of sides that did not run.
        off, on: the sides that differ in the optimisation alone.
        predicted: seconds that it should save.
        parts: what that was computed from.
        tolerance: relative; a side whose losses differ by more from those of `off` has failed.
    """
    wrong = dict(failed)
    first = [one.loss for one in passes.get(off, ())]
    for name, found in passes.items():
        worst = max((abs(a.loss - b) / abs(b) for a, b in zip(found, first, strict=True)), default=0.0)
        if not worst <= tolerance:
            wrong[name] = f"its loss is {worst:.2e} off that of {off}, over {tolerance:g}"
    sides = {name: _figures(found) for name, found in passes.items() if name not in wrong}
    sides |= {name: {"failed": why} for name, why in wrong.items()}
    row = {"sides": sides, "off": off, "on": on, "parts": dict(parts), "predicted": asdict(predicted)}
    if off in wrong or on in wrong or not {off, on} <= sides.keys():
        return row
    slow, fast = ([asdict(one) for one in passes[name]] for name in (off, on))
    gains = {part: ratio_summary([a[part] for a in slow], [b[part] for b in fast]) for part in PARTS}
    saved = median(a["seconds"] - b["seconds"] for a, b in zip(slow, fast, strict=True))
    peaks = [sides[name]["peak_bytes"] for name in (off, on)]
    return row | {
        "gains": gains, "saved_seconds": saved, "sound": sound(predicted.step, saved),
        "extra_bytes": None if None in peaks else peaks[1] - peaks[0],
    }  # fmt: skip


def _figures(found: Sequence[Pass]) -> dict[str, Any]:
    peaks = [one.peak for one in found if one.peak is not None]
    return {
        **{part: summary([getattr(one, part) for one in found]) for part in PARTS},
        "losses": [one.loss for one in found], "peak_bytes": max(peaks) if peaks else None,
    }  # fmt: skip
