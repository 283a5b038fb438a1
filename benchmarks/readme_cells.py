"""Cells and lines that the tables of the pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record_commands import command_of

SURE = 0.95


def grid(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; ``"side | >ms"``: names of columns, with ``>`` before those of figures."""
    names = columns.split(" | ")
    head = [name.removeprefix(">") for name in names]
    rule = ["---:" if name.startswith(">") else "---" for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def ratio_cell(ratio: Mapping[str, float]) -> str:
    sure = "" if ratio["coverage"] >= SURE else f", {ratio['coverage']:.0%}"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}{sure})"


def made_by(name: str, record: Mapping[str, Any]) -> str:
    """Return the line under a table: command, device, versions, commit, and the file of the record."""
    machine, versions = record["machine"], record["versions"]
    where = f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    where = machine.get("gpu") or where
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "transformers", "trl", "peft"))
    return f"`{command_of(record)}`: {where}, {packages}; {record_of(name, record)}."


def record_of(name: str, record: Mapping[str, Any]) -> str:
    """Return the file of a record and its commit; `benchmarks.stale` says whether that is of today's code.

    A commit that did not become part of the history has ``landed_as`` beside it: the one that holds its changes, and
    later ones. Where there was no git, ``tree`` is the commit whose code had the hashes of the record, except in the
    file ``but_for``.
    """
    source = record["source"]
    commit = source["commit"]
    if commit is None:
        but = f", but for `{source['but_for']}`" if "but_for" in source else ""
        text = f"measured without git: the hashes of its code are those of {source['tree'][:7]}{but}"
    elif "landed_as" in source:
        text = f"commit {commit[:7]}, which is not in the history ({source['landed_as'][:7]} has its changes)"
    else:
        text = f"commit {commit[:7]}"
    return f"`benchmarks/results/{name}`, {text}"


def between(text: str, begin: str, end: str, new: str) -> str:
    """Return a page with what stands between two marks replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the page has no {begin} ... {end}: put both marks where its numbers belong")
    return f"{before}{begin}\n{new}\n{end}{after}"
