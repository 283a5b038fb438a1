"""The kernel cases on a CPU: sides compute the same, and what does not is not timed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import micro
from benchmarks.__main__ import main
from benchmarks.micro import CASES, Case, measure, seconds_of
from fastpack_trl.errors import UserError

SMALL = {
    "collate": Case("collate", partial(micro.collate, tokens=256, rows=4), 1024),
    "metadata": Case("micro", partial(micro.metadata, tokens=64, layers=3), 64),
    "dispatch": Case("micro", partial(micro.dispatch, model="tiny-gpt-oss", tokens=64), 64),
    "decoder": Case("experts", partial(micro.decoder, model="tiny-gpt-oss", tokens=64), 64),
    **{
        f"experts {mode}": Case(
            "experts", partial(micro.experts, model="tiny-gpt-oss", mode=mode, tokens=64, skewed=True), 64
        )
        for mode in micro.MODES
    },
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "CASES", SMALL)
    monkeypatch.setattr(micro, "seconds_of", lambda call, device: call() is None or 0.5)


@pytest.mark.parametrize("name", SMALL)
def test_sides_of_a_case_compute_the_same(name: str, small: None) -> None:
    first, second = measure(name, 2, "cpu", 0)
    assert first["side"] != second["side"]
    assert first["seconds"] == second["seconds"] == [0.5, 0.5]
    assert first["tokens"] == 2 * SMALL[name].tokens


def test_a_side_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (2.0, float("nan")):
        sides = {"trl": lambda: torch.ones(3), "fastpack": lambda wrong=wrong: torch.full((3,), wrong)}
        monkeypatch.setitem(CASES, "wrong", Case("micro", lambda device, seed, sides=sides: sides, 1))
        with pytest.raises(UserError, match="the result of 'fastpack' differs from that of 'trl'"):
            list(measure("wrong", 1, "cpu", 0))


def test_records_of_all_rows_are_appended(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "micro.jsonl"
    assert 0 < seconds_of(lambda: torch.ones(8).sum(), "cpu") < 0.1
    assert main(["micro", "--rows", "metadata", "dispatch", "--rounds", "2", "--json", str(file)]) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(run["row"], run["steps"]) for run in records] == [("metadata", 2)] * 2 + [("dispatch", 2)] * 2
    assert all(run["command"].startswith("python -m benchmarks micro --rows metadata") for run in records)
    assert "| one sort | 500.0 |" in capsys.readouterr().out
