"""The table of a record of `benchmarks.row_profile`: kinds of kernels by row, beside the least time they could take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.kernel_kinds import KINDS, UNKNOWN
from benchmarks.readme_cells import grid
from fastpack_trl.bench.views import device_of

ENOUGH = 0.95
"""Share of the device's time that has a kind; below it the table says so."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a column per row and side; of each kind its milliseconds, and its bound in brackets."""
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
    titles = [row["row"] if row["side"] == "fastpack" else f"{row['row']}, {row['side']}" for row in rows]
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {kind: partial(_kind, kind) for kind in kinds}
    figures = [[name, *map(cell, rows)] for name, cell in {**cells, **_SUMMARY}.items()]
    lines = [head, "", grid(" | ".join(["kind", *(f">{name}" for name in titles)]), figures)]
    notes = [f"- {record['corrected']}"] if "corrected" in record else []
    notes += [note for row in rows for note in _notes(row)]
    notes += [f"- {row['row']}, {row['side']}: {_why(row)}" for row in record["rows"] if not row.get("kinds")]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _kind(kind: str, row: Mapping[str, Any]) -> str:
    found = row["kinds"].get(kind)
    return "-" if found is None else f"{_ms(found['seconds'])} ({_ms(found['bound_seconds'])})"


def _sum(row: Mapping[str, Any]) -> str:
    seconds, bound = (sum(kind[part] for kind in row["kinds"].values()) for part in ("seconds", "bound_seconds"))
    return f"{_ms(seconds)} ({_ms(bound)})"


def _farthest(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the kind whose time lies farthest above its bound, and by how many seconds."""
    gaps = {kind: one["seconds"] - one["bound_seconds"] for kind, one in row["kinds"].items()}
    worst = max(gaps, key=gaps.__getitem__)
    return worst, gaps[worst]


_SUMMARY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "sum": _sum,
    "farthest above its bound": lambda row: f"{_farthest(row)[0]}: {_ms(_farthest(row)[1])}",
    "step": lambda row: _ms(row["step_seconds"]),
    "idle": lambda row: "-" if row["idle"] is None else f"{row['idle']:.0%}",
    "launches": lambda row: "-" if row["launches"] is None else f"{row['launches']:,.0f}",
}
"""Lines below those of the kinds."""


def _notes(row: Mapping[str, Any]) -> list[str]:
    """Return the kernels without a kind, and the largest of the kind that is farthest above its bound."""
    found, (worst, _) = row["kinds"], _farthest(row)
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
