"""Measurements as text for people: aligned columns, and lines that the records of every measurement have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOISE_CORES = 0.1
"""Cores kept busy by other processes above which the table says that a row was not measured alone."""


def fact_lines(record: Mapping[str, Any]) -> list[str]:
    """Return three lines: device, versions, commit with seed."""
    machine, source = record["machine"], record["source"]
    device = machine.get("gpu") or machine["processor"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    commit = "installed package"
    if source["commit"] is not None:
        commit = f"commit {source['commit'][:12]}{' with uncommitted changes' if source['modified'] else ''}"
    threads = machine["threads"]
    return [
        f"{device}{driver}, {threads} thread{'s' * (threads != 1)} of {machine['cores']} cores, {record['date']}",
        versions,
        f"{commit}, seed {record['seed']}",
    ]


def disturbances(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line per row beside which other processes kept cores busy."""
    return [
        f"{row['tokens']:,} tokens: other processes kept {row['other_load']:.1f} cores busy; repeat on a quiet machine"
        for row in rows
        if (row.get("other_load") or 0.0) > NOISE_CORES
    ]


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of columns of one width each; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Figures to the right, words to the left, by what stands below the heading.
    left = [not cell[:1].isdigit() or " " in cell for cell in cells[-1]]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]


def interval_cell(ratio: Mapping[str, float]) -> str:
    """Return ``1.20 to 1.31 (96.1%)``: the ends of an interval and its coverage."""
    return f"{ratio['low']:.2f} to {ratio['high']:.2f} ({ratio['coverage']:.1%})"
