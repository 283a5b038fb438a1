"""Every number of README and docs/benchmarks.md has the JSON file of its run behind it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.by_itself import PUBLISHED, ROWS
from benchmarks.command import COMMANDS
from benchmarks.first_screen import SHORT, lines, memory
from benchmarks.losers import other_losers
from benchmarks.open_list import PLANNED_CASES, open_list
from benchmarks.pictures import FOLDER, picture_names, stale_pictures
from benchmarks.readme import (
    BEGIN,
    END,
    FIGURES,
    GLANCE,
    PAGE,
    PAGES,
    numbers,
    with_glance,
    with_numbers,
    with_optimisation,
    without_gain,
)  # fmt: skip
from benchmarks.record_commands import begun
from benchmarks.results_folder import RESULTS, load_results
from benchmarks.side_by_side import DEFAULT_SIDES
from benchmarks.side_table import cells, peak_cell, slower
from benchmarks.training_rows import FIRST
from fastpack_trl.bench.views import no_gain

ROOT = Path(__file__).parents[2]
NAMES = ("cell", "row", "model", "name", "setting")
"""Keys of a row that say what it is."""


@pytest.mark.parametrize(("page", "fill"), [(PAGE, with_numbers), ("README.md", with_glance)])
def test_pages_and_results_agree(page: str, fill: Any) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert fill(text, load_results()) == text, "run: python -m benchmarks.readme"


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_one_optimisation_have_their_record_or_its_command(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_optimisation(page, text, load_results()) == text, "run: python -m benchmarks.readme"
    assert f"python -m benchmarks.by_itself {PAGES[page]} " in text.partition(FIGURES[0])[2].partition(FIGURES[1])[0]


@pytest.mark.parametrize("page", ["docs/packed-metadata.md", "docs/routing.md"])
def test_pages_say_how_much_more_than_predicted_was_saved(page: str) -> None:
    (record,) = (
        record
        for record in load_results().values()
        if record["case"] == "by_itself" and record["settings"]["optimisation"] == PAGES[page]
    )
    times = sorted(row["saved_seconds"] / sum(row["predicted"].values()) for row in record["rows"])
    said = f"{times[0]:.1f} to {times[-1]:.1f} times as much was saved as predicted. The arithmetic stops at"
    assert said in " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_every_record_that_a_page_names_is_there(page: str) -> None:
    for name in re.findall(r"benchmarks/results/([\w.*-]+\.json)", (ROOT / page).read_text(encoding="utf-8")):
        assert list(RESULTS.glob(name)), name


@pytest.mark.parametrize("case", sorted(COMMANDS.keys() & {record["case"] for record in load_results().values()}))
def test_a_command_prints_the_records_that_are_there(case: str) -> None:
    command = getattr(import_module(f"benchmarks.{case}"), "COMMAND", None)
    for record in (record for record in load_results().values() if record["case"] == case and command is not None):
        text = command.table(record)
        names = [[str(row[key]) for key in NAMES if key in row] for row in record["rows"]]
        assert all(name[0] in text for name in names if name)


def test_rows_of_the_readme_name_their_record_and_its_commit() -> None:
    for name, record in load_results().items():
        if record["case"] in ("first_step", "side_by_side") and record["machine"]["device"] == "cuda":
            text = with_glance("".join(GLANCE), {name: record})
            commit = record["source"]["commit"]
            assert f"`benchmarks/results/{name}`, commit {commit[:7] if commit else 'not recorded'}" in text


def test_results_are_complete_runs_without_names_of_machines_or_folders() -> None:
    for name, record in load_results().items():
        assert name.startswith(f"{record['case']}_{record['machine']['device']}_")
        assert not record["source"]["modified"], f"{name} was measured on changes that no commit has"
        assert "/" not in str(record["machine"].values())


def test_what_no_table_shows_is_said_and_open_in_one_list() -> None:
    said = 0
    results = load_results()
    (listed,) = open_list(results)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page.index(listed) > page.rindex("| --- |")
    for name, record in results.items():
        rows = begun(record)
        counts = record["case"] not in {*PLANNED_CASES, "cuda_tests"}
        skipped = sum(bool(row.get("skipped")) for row in rows) if counts else 0
        assert (f"- {skipped} of {len(rows)} rows of `{name}`" in listed) == bool(skipped), name
        alike = [other for other in results.values() if other["case"] == record["case"]]
        of_some = {row.get("model") for other in alike for row in begun(other)}
        assert {row.get("model") for row in record["rows"]} <= of_some, f"{name}: a model of it is in no list"
        assert (f"`{name}`, which was stopped" in listed) != record["complete"], name
        text = numbers({name: record})
        for row in record["rows"]:
            for side, figures in row["sides"].items() if isinstance(row.get("sides"), dict) else ():
                if "failed" in figures:
                    assert f"*{side}* (" in text.partition("Did not run: ")[2], (name, side)
                    said += 1
    assert said


def test_the_open_list_asks_for_what_no_record_of_a_gpu_has() -> None:
    def listed(device: str, *rows: dict[str, Any]) -> str:
        machine = {"device": device}
        return open_list({"x": {"case": "side_by_side", "rows": rows, "machine": machine, "complete": True}})[0]

    row, *others = FIRST
    runs = [{"row": row, "side": side} for side in DEFAULT_SIDES]  # what else a run has is not read here
    assert f'--rows "{row}" "{others[0]}" ' in listed("cuda", *runs[:1])
    assert f'--rows "{row}" "{others[0]}" ' in listed("cpu", *runs)
    assert f'--rows "{others[0]}" ' in listed("cuda", *runs)
    assert f'--rows "{row}" "{others[0]}" ' in listed("cuda", *({**run, "skipped": "no time"} for run in runs))
    every = [{"row": row, "side": side} for row in FIRST for side in DEFAULT_SIDES]
    assert "six rows beside stock" not in listed("cuda", *every)
    assert max(map(len, listed("cpu").splitlines())) < 1000  # a command is pasted as one line


def test_published_figures_stand_beside_what_was_measured_here() -> None:
    published = numbers(load_results()).partition("**What others have published**")[2].partition("**Where")[0]
    assert "| open |" not in published
    assert "0.37 GB more | 8B, whole model, B200 | +3.0% (+2.7% to +3.3%) |" in published


def test_without_results_nothing_is_claimed() -> None:
    text = numbers({})
    assert text.startswith("Nothing is measured.")
    for row, published in PUBLISHED.items():
        assert f"| {ROWS[row]} | {published.quoted} | {published.setting} | open |" in text
    assert with_numbers(f"a {BEGIN} 9x faster {END} b", {}) == f"a {BEGIN}\n{text}\n{END} b"
    assert "9x" not in with_glance(f"{GLANCE[0]} 9x {GLANCE[1]}", {})
    for fill in (with_numbers, with_glance):
        with pytest.raises(ValueError, match="put both marks"):
            fill("no marks", {})


def test_the_first_screen_has_one_number_of_a_whole_run_a_row_and_the_memory_of_graphs() -> None:
    results = load_results()
    (first,) = [record for record in results.values() if record["case"] == "first_step"]
    records = [record for record in results.values() if record["case"] == "side_by_side"]
    sides = {row: found for one in records for row, found in cells(one).items() if found["stock"].runs}  # the last one
    shown = with_glance("".join(GLANCE), results)
    table = [line for line in shown.splitlines() if "x** |" in line]
    assert len(table) == len(lines(results)) == len(first["rows"][:2]) + len(FIRST) - 1
    for row, line in zip(first["rows"][:2], table, strict=False):
        if row["row"] in sides:  # a record of whole runs comes first
            cell = sides[row["row"]]
            assert (
                f" not packed, batch size 2, 4 accumulated | **{cell['fastpack'].whole / cell['stock'].whole:.1f}x** |"
                in line
            )
            continue
        stock, ours = (
            next(run for run in row["runs"] if (run["side"], run["steps"], run["long"], run["cache"]) == key)
            for key in (("stock", 100, False, "cold"), ("fastpack", 100, False, "cold"))
        )
        ratio = stock["train_seconds"] / ours["train_seconds"]
        assert f" not packed, batch size 2, 4 accumulated | **{ratio:.1f}x** | - |" in line
    found = sides["qwen3-8b lora 4096"]
    times = [found["fastpack"].whole / found[side].whole for side in ("stock", "stock compiled")]
    held = [memory(found[side].runs) for side in ("stock", "fastpack (same memory)", "fastpack")]
    shares = " | ".join(f"{each:.1f} GiB" for each in held)
    assert f"4,096 tokens | **{times[0]:.1f}x** | {times[1]:.1f}x | {shares} |" in shown
    profile = sides[SHORT]["stock"].runs[0]["profile"]
    assert f"its step launches {profile['launches']:,.0f} kernels" in shown


def test_memory_is_what_was_reserved_or_tensors_and_the_graphs_that_stay() -> None:
    reason = "6 graphs of 6.60 GiB; padding of 16.2%"
    graphs = {"peak_gib": 2.0, "report": {"features": {"cuda_graph": {"status": "on", "reason": reason}}}}
    given_back = {"peak_gib": 2.0, "report": {"features": {"cuda_graph": {"status": "off", "reason": reason}}}}
    assert memory([graphs, {"peak_gib": 1.0}]) == 8.6
    assert memory([given_back]) == 2.0
    assert memory([{"peak_gib": 2.0, "reserved_gib": 3.0}, {"peak_gib": 2.0, "reserved_gib": 2.5}]) == 3.0
    assert (peak_cell([graphs]), peak_cell([given_back]), peak_cell([{"peak_gib": None}])) == ("2.0 + 6.6", "2.0", "-")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


def test_pictures_were_drawn_from_the_results() -> None:
    results = load_results()
    assert stale_pictures(results, RESULTS, ROOT / FOLDER) == [], "run: python -m benchmarks.readme"
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert all(f"({Path(FOLDER).name}/{picture})" in page for picture in picture_names(results).values())


def test_readme_names_rows_that_do_not_help() -> None:
    results = load_results()
    (table,) = without_gain(results)
    listed = table.splitlines()[4:]
    no_table = ("attention", "nf4")
    shown = [record for record in results.values() if record["case"] not in no_table]
    weak = [found for record in shown for found in no_gain(record)]
    below = [line for record in results.values() for line in slower(record)]
    assert weak
    others = list(other_losers(results))
    assert len(listed) == len(weak) + len(below) + len(others)
    for known in (
        "FSDP 2, Qwen3-0.6B full fine-tuning",
        "qwen3-8b lora 4096",
        "qwen3-14b nf4 4096",
        "llama-3.2-1b full 2048",
    ):
        assert any(line.startswith(f"| {known}, NVIDIA H200 ") for line in others), known
    assert all(line in listed for line in below)
    for row, ratio in weak:
        assert any(row.label in line and f"| {ratio} |" in line for line in listed), (row.label, ratio)
