"""The case of everyday rows: documents of the lengths it names, both sides timed in turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forks
import pytest

from benchmarks import everyday
from fastpack_trl.errors import UserError


def test_documents_have_the_lengths_that_the_case_names() -> None:
    _, rows = everyday.documents(0)
    lengths = set(map(len, rows["input_ids"]))
    assert len(rows) == everyday.DOCUMENTS
    assert everyday.SHORTEST <= min(lengths) < max(lengths) <= everyday.LONGEST


SMALL = {"rounds": 2, "seed": 0, "layers": 2, "hidden": 16, "threads": 1}


def test_a_cell_has_both_sides_and_their_ratio() -> None:
    row = everyday.measure_cell({"cell": "1x4-lora"}, "both", **SMALL)
    assert (row["batch_size"], row["gradient_accumulation_steps"]) == (1, 4)
    assert all(row["sides"][side]["seconds"]["median"] > 0 for side in everyday.SIDES)
    assert row["ratios"]["stock"]["median"] > 0


def test_several_cells_have_a_process_each_and_one_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forks.python())
    small = ["--pairs", "2", "--layers", "1", "--hidden", "16"]
    everyday.COMMAND.main(["1x1-full", "2x1-lora", *small, "--json", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["cell"] for row in record["rows"]] == ["1x1-full", "2x1-lora"]
    assert [row["trained_parameters"] < row["parameters"] for row in record["rows"]] == [False, True]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1x1-full", "2x1-lora"]
    with pytest.raises(UserError, match="1x1-full"):
        everyday.COMMAND.main(["1x1-ful", "2x1-lora", *small])
