"""The case `preference`: steps in turn, and whole runs one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.preference import COMMAND, OURS, ROWS, STOCK


@pytest.mark.slow
def test_whole_runs_are_timed_in_their_second_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, name = tmp_path / "record.json", "dpo tiny-qwen3 2 run"
    assert COMMAND.main(["--rows", name, "--json", str(file)]) in (None, 0)
    record = json.loads(file.read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert record["complete"]
    assert row["steps"] == ROWS[name].run
    for side in (STOCK, OURS):
        assert len(row["sides"][side]["seconds"]["values"]) == ROWS[name].run - ROWS[name].run // 2
    assert row["loss_difference"] < 1e-5
    assert "packed_attention" in row["sides"][OURS]["features"]
    assert f"{name}  {OURS}" in capsys.readouterr().out.replace("   ", "  ")
