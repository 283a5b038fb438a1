"""The table of a record of `benchmarks.row_profile`: kinds of kernels by row, beside the least time they could take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.kernel_kinds import KINDS, UNKNOWN
from fastpack_trl.bench.views import device_of

ENOUGH = 0.95
"""Share of the device's time that has a kind; below it the table says so."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row and side, milliseconds of each kind and its bound in brackets."""
    rows = [row for row in record["rows"] if row.get("kinds")]
    kinds = [kind for kind in KINDS if any(kind in row["kinds"] for row in rows)]
    settings = record["settings"]
    head = (
        f"**Where the device's time of a step goes, {device_of(record)}.** Milliseconds per step, in brackets the "
        f"least that this kind could take at {settings['tflops']:,.0f} TFLOP/s and "
        f"{settings['terabytes_per_second']:g} TB/s (`benchmarks/step_bounds.py` has the formulas; products as they "
        "were run, recomputation included). Kernels are launched one by one here: idle share and launches are those "
        "of a step that is not replayed as a graph."
    )
    columns = ["row", "side", *kinds, "sum", "farthest above its bound", "launches", "idle"]
    lines = [head, "", f"| {' | '.join(columns)} |", f"| --- | --- | {' | '.join(['---:'] * (len(columns) - 2))} |"]
    for row in rows:
        lines.append(f"| {row['row']} | {row['side']} | {' | '.join(_cells(row, kinds))} |")
    lines += [f"| {row['row']} | {row['side']} | {_why(row)} |" for row in record["rows"] if not row.get("kinds")]
    notes = [note for row in rows for note in _notes(row)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cells(row: Mapping[str, Any], kinds: list[str]) -> list[str]:
    found = row["kinds"]
    cells = [
        f"{_ms(found[kind]['seconds'])} ({_ms(found[kind]['bound_seconds'])})" if kind in found else "-"
        for kind in kinds
    ]
    sums = [sum(kind[part] for kind in found.values()) for part in ("seconds", "bound_seconds")]
    gaps = {kind: one["seconds"] - one["bound_seconds"] for kind, one in found.items()}
    worst = max(gaps, key=gaps.__getitem__)
    launches = "-" if row["launches"] is None else f"{row['launches']:,.0f}"
    idle = "-" if row["idle"] is None else f"{row['idle']:.0%}"
    return [*cells, f"{_ms(sums[0])} ({_ms(sums[1])})", f"{worst}: {_ms(gaps[worst])}", launches, idle]


def _notes(row: Mapping[str, Any]) -> list[str]:
    """Return the kernels without a kind, and the largest of the kind that is farthest above its bound."""
    found = row["kinds"]
    gaps = {kind: one["seconds"] - one["bound_seconds"] for kind, one in found.items()}
    worst = max(gaps, key=gaps.__getitem__)
    named = "; ".join(f"`{_cut(name)}` {_ms(seconds)} ms in {count:,.0f}" for name, seconds, count in
                      found[worst]["largest"])  # fmt: skip
    notes = [f"- {row['row']}, {row['side']}: largest of *{worst}*: {named}."]
    if row["classified"] < ENOUGH:
        names = ", ".join(f"`{_cut(name)}`" for name, *_ in found[UNKNOWN]["largest"])
        notes.append(f"- {row['row']}, {row['side']}: only {row['classified']:.0%} of the time has a kind: {names}.")
    return notes


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _cut(name: str, length: int = 60) -> str:
    return (name if len(name) <= length else f"{name[: length - 3]}...").replace("|", "/")


def _why(row: Mapping[str, Any]) -> str:
    return str(row.get("failed") or row.get("skipped") or "-").splitlines()[-1]
