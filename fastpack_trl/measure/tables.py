"""Measurements as text: aligned columns, and the machine and versions of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def facts_line(record: Mapping[str, Any]) -> str:
    """Return device, threads, versions and commit of a record in one line."""
    machine, source, versions = record["machine"], record["source"], record["versions"]
    commit = "installed package"
    if source["commit"] is not None:
        commit = f"commit {source['commit'][:12]}{' with uncommitted changes' if source['modified'] else ''}"
    threads = machine["threads"]
    parts = [machine.get("gpu") or machine["processor"], f"{threads} thread{'s' * (threads != 1)}"]
    return ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "trl")), commit])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Align figures right and words left, by the cells below the heading.
    left = [not cell[:1].isdigit() or " " in cell for cell in cells[-1]]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]
