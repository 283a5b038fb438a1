"""The pages of one optimisation each: their figures from the record of `benchmarks.by_itself`, and their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.arithmetic import SOUND, apart, published_checks
from benchmarks.by_itself_table import table
from benchmarks.published import GUIDE
from benchmarks.readme_cells import between, made_by

PAGES = {"docs/packed-metadata.md": "metadata", "docs/offload-reload.md": "reload", "docs/routing.md": "routing"}
FIGURES = ("<!-- by itself -->", "<!-- /by itself -->")
CHECKS = ("<!-- published -->", "<!-- /published -->")
_OF_PAGE = {"metadata": "metadata", "reload": "reloads"}
"""Word in the names of the checks of the published figures, by optimisation."""


def with_optimisation(page: str, text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a page of `PAGES` with its figures and checks replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    name = PAGES[page]
    text = between(text, *FIGURES, figures(name, results))
    return between(text, *CHECKS, checks(_OF_PAGE[name])) if name in _OF_PAGE else text


def figures(name: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables of the records of one optimisation on a GPU; without one, the command that makes it."""
    found = [
        f"{table(record)}\n\n{made_by(file, record)}"
        for file, record in results.items()
        if record["case"] == "by_itself" and record["settings"]["optimisation"] == name
        and record["machine"]["device"] == "cuda"
    ]  # fmt: skip
    missing = f"There is no record of it yet: `python -m benchmarks.by_itself {name} --json FILE` on a GPU makes it."
    return "\n\n".join(found or [missing])


def checks(word: str) -> str:
    """Return what the arithmetic says about the published figures that have this word in their name."""
    lines = [f"| of [the guide]({GUIDE}) | predicted | published | apart |", "| --- | ---: | ---: | ---: |"]
    for name, predicted, published in published_checks():
        if word in name.split():
            form = "{:.1%}" if published < 1 else "{:,.0f}"
            off = apart(predicted, published)
            shown = [form.format(value) for value in (predicted, published)]
            lines.append(f"| {name} | {' | '.join(shown)} | {off:.0%}{'' if off <= SOUND else ', too far'} |")
    return "\n".join(lines)
