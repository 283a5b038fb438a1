"""Measurements as text for people: aligned columns, and where and with what a record was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def facts_line(record: Mapping[str, Any]) -> str:
    """Return device, threads, versions and commit of a record in a line."""
    machine, source, versions = record["machine"], record["source"], record["versions"]
    commit = "installed package"
    if source["commit"] is not None:
        commit = f"commit {source['commit'][:12]}{' with uncommitted changes' if source['modified'] else ''}"
    threads = machine["threads"]
    parts = [machine.get("gpu") or machine["processor"], f"{threads} thread{'s' * (threads != 1)}"]
    return ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "trl")), commit])


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
