"""``python -m benchmarks --case headline``: every published row runs beside its before, and is never called ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import command, headline, lora
from benchmarks.command import main
from benchmarks.headline import ENTRIES, FULL, TINY, Entry
from benchmarks.headline_table import gain_lines, gains_table, report_lines
from benchmarks.lora_models import LoraModel
from benchmarks.moe_sides import SHAPES
from benchmarks.published import PUBLISHED, ROWS
from fastpack_trl.bench import plots, report
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.bench.views import rows_of
from fastpack_trl.errors import UserError

TOKENS = 48
ROUTED_TOKENS = 256  # in bf16 a token may be sent to another expert: the gate needs more than a few tokens


def _smallest(entry: Entry) -> Entry:
    part: Any = entry.part
    if isinstance(part, tuple):
        part = (LoraModel("tiny-qwen3", "bf16"), 2, TOKENS)
    elif isinstance(part, headline.moe.Row):
        part = replace(part, tokens=TOKENS)
    elif isinstance(part, LoraModel):
        part = replace(part, base="fp32")
    return replace(entry, part=part, tokens=ROUTED_TOKENS if part == "tiny-gpt-oss" else TOKENS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headline") / "headline.json"


@pytest.fixture(scope="module")
def record(file: Path) -> dict[str, Any]:
    """All rows in the smallest shapes; stock tuned, whose layers take seconds to capture, in one of them only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENTRIES, "tiny", tuple(map(_smallest, TINY)))
        patch.setattr(lora, "HEADLINE_SIDES", tuple(n for n in lora.HEADLINE_SIDES if n != lora.COMPILED))
        patch.setattr(headline.model_steps, "COMPILED_WARMUP", 1)
        step_sides = headline.STEP_SIDES
        patch.setattr(headline, "STEP_SIDES", tuple(name for name in step_sides if name != "tuned"))
        run = {"scale": "tiny", "rounds": 1, "threads": 1, "file": ResultFile(file)}
        headline.measure(**run, rows=tuple(entry.row for entry in TINY if entry.row != "llama-3.2-1b"))
        patch.setattr(headline, "STEP_SIDES", step_sides)
        return headline.measure(**run)  # goes on with the row that is missing


def test_every_row_of_the_published_table_is_measured_beside_its_before(record: dict[str, Any], file: Path) -> None:
    assert [row["row"] for row in record["rows"]] == list(ROWS)
    assert record["complete"]
    for row in record["rows"]:
        assert "skipped" not in row, row
        before = row["gains"][row["before"]]
        assert before["seconds"]["median"] > 0
        if not row["row"].endswith("-reload"):
            assert {"forward", "backward"} <= before.keys()
            assert "stock" in row["ratios"]
    assert json.loads(file.read_text())["rows"] == json.loads(json.dumps(record["rows"]))


def test_gains_are_the_ratios_of_the_sides_own_times(record: dict[str, Any]) -> None:
    for row, view in zip(record["rows"], rows_of(record), strict=True):
        ours = next(name for name in ("fastpack", "double_buffer") if name in row["sides"])
        before = row["sides"][row["before"]]["seconds"]["values"][0]
        assert row["gains"][row["before"]]["seconds"]["median"] == before / row["sides"][ours]["seconds"]["values"][0]
        assert {ratio.over for ratio in view.ratios} == row["ratios"].keys() - {"fastpack_plan"}


def test_stock_tuned_runs_compiled_layers_with_the_same_losses(record: dict[str, Any]) -> None:
    (row,) = [row for row in record["rows"] if row["row"] == "llama-3.2-1b"]
    tuned, ours = row["sides"]["tuned"], row["sides"]["fastpack"]
    assert tuned["path"] == "per_document, layers compiled by accelerate (eager backend)"
    assert tuned["losses"] == pytest.approx(ours["losses"], rel=1e-2)
    assert row["documents"]["longest"] <= TOKENS


def test_the_tables_say_what_is_ours_and_quote_what_is_not(record: dict[str, Any], file: Path, tmp_path: Path) -> None:
    text = command.table(record)
    first, *pictures = report.write_report([file], tmp_path, report_lines)
    written = first.read_text()
    for row in record["rows"]:
        gain = row["gains"][row["before"]]["seconds"]["median"] - 1
        assert f"{row['row']} over {row['before']}" in text
        assert f"step {gain:+.1%} (" in text
        assert f"| {row['before']} |" in written
        assert f"| {gain:+.1%} (" in written
    for published in PUBLISHED.values():
        assert f"published by others: {published.quoted}" in text
        assert f"| {published.quoted} |" in written
        assert published.source in written
    assert {picture.name for picture in pictures} == {
        f"headline_{name}.png" for name in ("speed", "breakdown", "ratios")
    }


def test_an_interval_of_too_few_pairs_says_what_it_covers(record: dict[str, Any]) -> None:
    (row, *_) = record["rows"]
    gains = row["gains"][row["before"]]
    for coverage, end in ((0.0, "(one pair)"), (0.75, ", covers 75%)"), (0.969, "%)")):
        changed = {**row, "gains": {row["before"]: {**gains, "seconds": {**gains["seconds"], "coverage": coverage}}}}
        (line, *_) = [line for line in gain_lines([changed]) if f"over {row['before']}: " in line]
        assert line.endswith(end)
        assert ("covers" in line) == (coverage == 0.75)


def test_tiny_figures_say_what_they_are_not(record: dict[str, Any]) -> None:
    assert "say nothing about the public shapes" in command.table(record)
    full = {**record, "settings": {**record["settings"], "scale": "full"}}
    assert "say nothing about the public shapes" not in command.table(full)


def test_rows_that_nobody_measured_say_so(record: dict[str, Any]) -> None:
    one = {**record, "rows": record["rows"][:1]}
    lines = gains_table([one], every_row=True).splitlines()
    assert sum("| not measured yet |" in line for line in lines) == len(ROWS) - 1
    assert sum("qwen3-14b-qlora: " in line for line in lines) == 1


def test_both_scales_have_the_same_rows_with_the_same_befores() -> None:
    assert [(e.row, e.before, type(e.part)) for e in TINY] == [(e.row, e.before, type(e.part)) for e in FULL]
    assert [entry.row for entry in FULL] == list(ROWS)
    assert PUBLISHED.keys() <= ROWS.keys()
    (experts,) = [entry.part for entry in FULL if isinstance(entry.part, headline.moe.Row)]
    assert experts.layers == SHAPES[experts.model].fields["num_hidden_layers"]  # the whole model


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--case", "headline", "--scale", "full", "--device", "cpu"], "use --scale tiny here"),
        (["--case", "headline", "--rows", "qwen9"], "no row 'qwen9' in the headline table"),
        (["--case", "headline", "--model", "small"], "--model does not go with this case"),
        (["--case", "moe", "--scale", "tiny"], "go with --case headline"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", *arguments]) == 2
    assert part in capsys.readouterr().err
    with pytest.raises(UserError, match="no scale 'huge'"):
        headline.measure(scale="huge")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_row_runs_on_cuda_with_memory_over_the_step() -> None:
    record = headline.measure(scale="tiny", rounds=1, threads=1, device="cuda")
    for row in record["rows"]:
        assert row["gains"][row["before"]]["seconds"]["median"] > 0, row
        assert all(side["memory"]["peak_bytes"] > 0 for side in row["sides"].values() if "failed" not in side)
        if row["compares"] in ("lora", "model_steps"):
            marks = row["sides"]["fastpack"]["memory_marks"]
            assert [at for at, _ in marks] == sorted(at for at, _ in marks)
            assert len(marks) == 5
    assert plots.memory_over_step(record) is not None
