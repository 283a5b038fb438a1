"""Tables and pictures of README and docs/benchmarks.md from the records: ``python -m benchmarks.readme``.

Run in a checkout. Rewrites what stands between the marks; a test fails when text and files disagree.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    cuda_tests,
    equal_memory,
    fp8_accuracy,
    fp8_steps,
    hybrid,
    row_profile,
    shared_prefixes,
    side_table,
)
from benchmarks.arithmetic import SOUND, apart, published_checks
from benchmarks.by_itself import GUIDE, PUBLISHED, ROWS, step_gain
from benchmarks.by_itself import table as by_itself_table
from benchmarks.case_tables import (
    activation_table,
    collator_table,
    host_overhead_table,
    moe_table,
)
from benchmarks.first_screen import glance
from benchmarks.losers import other_losers, several_gpus_table
from benchmarks.open_list import open_list
from benchmarks.pictures import FOLDER, picture_names, write_pictures
from benchmarks.readme_cells import between, grid, made_by
from benchmarks.readme_runs import first_step_table, memory_caps_table, of_case
from benchmarks.results_folder import RESULTS, load_results
from fastpack_trl.bench.views import device_of, no_gain

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
GLANCE = ("<!-- glance -->", "<!-- /glance -->")
GLOSSARY = """**What the words mean**, in every table unless it says otherwise:

- *stock*: `trl.SFTTrainer` as installed: sdpa attention, gradient checkpointing.
- *stock compiled*: the same, its layers compiled by accelerate (`torch_compile` by regions).
- *fastpack*: `FastSFTTrainer` at its defaults. *fastpack (same memory)*: it recomputes what stock recomputes.
- *over stock*, *over compiled*: that side's time over ours for the same tokens; above 1 fastpack is faster. Where
  sides took turns it is the median of the ratios pair by pair, so not the quotient of two columns; behind it its
  interval, with the probability that it covers the median where that is under 95 %.
- *tokens/s*: tokens without padding, of the median step after the warm-up. *all steps*, *whole run*: of all steps
  together.
- *peak*: GiB of device memory. What torch reserved; in older records what tensors took, + what CUDA graphs held
  beside it.
- *loss from stock's*: the largest relative difference of a logged loss of the same step. *launches*: of kernels, a
  step.
"""
ROOT = Path(__file__).parents[1]
PAGE = "docs/benchmarks.md"


PAGES = {"docs/packed-metadata.md": "metadata", "docs/offload-reload.md": "reload", "docs/routing.md": "routing"}
FIGURES = ("<!-- by itself -->", "<!-- /by itself -->")
CHECKS = ("<!-- published -->", "<!-- /published -->")
_OF_PAGE = {"metadata": "metadata", "reload": "reloads"}
"""Word in the names of the checks of the published figures, by optimisation."""


def numbers(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown between the marks: tables and pictures per case, the published table, what does not help."""
    parts = [GLOSSARY.strip()]
    for case, table in _TABLES.items():
        for name, record in results.items():
            if record["case"] == case:
                parts += [table(name, record) + _left_out(record), *_picture(name, record)]
    parts += memory_caps_table(results)
    if len(parts) == 1:
        parts = ["Nothing is measured."]
    return "\n\n".join([*parts, _published(results), *without_gain(results), *open_list(results)])


def _left_out(record: Mapping[str, Any]) -> str:
    """Return which sides of the table of a record did not run, and why."""
    failed: dict[str, str] = {}
    for row in record["rows"]:
        sides = row.get("sides")
        for name, side in sides.items() if isinstance(sides, dict) else ():
            if isinstance(side, dict) and side.get("failed"):
                failed.setdefault(name, str(side["failed"]).partition(": ")[0])
    listed = ", ".join(f"*{name}* ({reason})" for name, reason in failed.items())
    return f" Did not run: {listed}." if failed else ""


def _published(results: Mapping[str, Mapping[str, Any]]) -> str:
    here = [row for _, record in of_case(results, "by_itself") for row in record["rows"] if "gains" in row]
    quoted = [
        [ROWS[name], one.quoted, one.setting,
         "; ".join(step_gain(row) for row in here if row["row"].startswith(name)) or "open"]
        for name, one in PUBLISHED.items()
    ]  # fmt: skip
    said = (
        f"**What others have published** about three optimisations, quoted from {GUIDE}, on other hardware and against "
        "other code: none of it is a figure of this package. *here*: by how much a step is faster with that "
        "optimisation alone, and its interval; of routing at 2,048 and 8,192 tokens. With more figures and the "
        "arithmetic: [packing metadata](packed-metadata.md), [reload of offloaded inputs](offload-reload.md), "
        "[routing](routing.md)."
    )
    return f"{said}\n\n{grid('row | published | setting | here', quoted)}"


def _picture(name: str, record: Mapping[str, Any]) -> list[str]:
    picture = picture_names({name: record}).get(name)
    return [] if picture is None else [f"![{record['case']}, {device_of(record)}]({Path(FOLDER).name}/{picture})"]


def without_gain(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the rows in which fastpack is slower than another side, or the interval leaves it open."""
    lines = [
        f"| {row.label}, {device_of(record)} | {ratio.over} | {ratio.by} | {ratio} | "
        f"{'slower' if ratio.slower else 'not told apart'} |"
        for name, record in results.items()
        if record["case"] in _TABLES
        for row, ratio in no_gain(record)
    ]
    lines += [line for record in results.values() for line in side_table.slower(record)]
    lines += list(other_losers(results))
    if not lines:
        return []
    head = (
        "**Where it does not help.** Every row above whose interval does not lie above 1, cases of several GPUs whose "
        "steps overlap, and rows whose CUDA graphs were given back ([docs/captured-step.md](captured-step.md))."
    )
    return [
        "\n".join(
            [head, "", "| row | beside | side of ours | ratio | so it is |", "| --- | --- | --- | ---: | --- |", *lines]
        )
    ]


def with_numbers(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of `PAGE` with its numbers replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    return between(page, BEGIN, END, numbers(results))


def with_glance(readme: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the README with the rows at its top replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    return between(readme, *GLANCE, glance(results))


def _made(table: Callable[[Mapping[str, Any]], str]) -> Callable[[str, Mapping[str, Any]], str]:
    """Return a table of a case of its own with the line of its record."""
    return lambda name, record: f"{table(record)}\n\n{made_by(name, record)}"


_TABLES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "side_by_side": _made(side_table.table),
    "several_gpus": _made(several_gpus_table),
    "row_profile": _made(row_profile.table),
    "activation_memory": activation_table,
    "first_step": first_step_table,
    "equal_memory": _made(equal_memory.table),
    "fp8_steps": _made(fp8_steps.table),
    "fp8_accuracy": _made(fp8_accuracy.table),
    "moe": moe_table,
    "host_overhead": host_overhead_table,
    "collator": collator_table,
    "shared_prefixes": _made(shared_prefixes.markdown),
    "hybrid": _made(hybrid.markdown),
    "cuda_tests": cuda_tests.said,
}


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
        f"{by_itself_table(record)}\n\n{made_by(file, record)}"
        for file, record in results.items()
        if record["case"] == "by_itself" and record["settings"]["optimisation"] == name
        and record["machine"]["device"] == "cuda"
    ]  # fmt: skip
    missing = f"There is no record of it yet: `python -m benchmarks.by_itself {name} --json FILE` on a GPU makes it."
    return "\n\n".join(found or [missing])


def checks(word: str) -> str:
    """Return what the arithmetic says about the published figures that have this word in their name."""
    lines = []
    for name, predicted, published in published_checks():
        if word in name.split():
            form = "{:.1%}" if published < 1 else "{:,.0f}"
            off = apart(predicted, published)
            far = "" if off <= SOUND else ", too far"
            lines.append([name, form.format(predicted), form.format(published), f"{off:.0%}{far}"])
    return grid(f"of [the guide]({GUIDE}) | >predicted | >published | >apart", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the numbers of this checkout's pages, and draw their pictures."""
    ArgumentParser(prog="python -m benchmarks.readme", description=main.__doc__).parse_args(arguments)
    results = load_results()
    write_pictures(results, RESULTS, ROOT / FOLDER)
    for page, fill in ((PAGE, with_numbers), ("README.md", with_glance)):
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_optimisation(page, path.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
