"""The case of prepared data sets: equal rows, both sides timed, batches not refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import preparation
from fastpack_trl.packing import tokenized


def test_each_kind_has_both_sides_and_equal_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized, "LEAST_ROWS", 20)
    monkeypatch.setattr(preparation, "VOCABULARY", 400)
    monkeypatch.setattr(preparation, "_texts", lambda _all=preparation._texts: _all()[:40])
    file = tmp_path / "record.json"
    assert preparation.COMMAND.main(["--documents", "30", "--rounds", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["setting"] for row in rows] == list(preparation.ROWS)
    for row in rows:
        assert (row["equal"], row["row_by_row"], row["documents"]) == (True, "", 30)
        assert all(row["sides"][side]["seconds"]["median"] > 0 for side in preparation.SIDES)
        assert row["ratio"]["median"] > 0
    printed = capsys.readouterr()
    assert printed.out.count("equal rows") == printed.err.count("equal rows") == len(rows), "at the end, as it goes"
