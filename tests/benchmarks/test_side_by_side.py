"""Side by side: which runs there are, figures of both trainers, which times are believed, table and chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import SMALL, decided, main, measure, measure_side, runs
from benchmarks.side_table import LOSS_BUDGET, believed, cells, table
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.errors import UserError


def test_the_sides_of_a_row_take_turns_from_round_to_round() -> None:
    assert list(runs(["a", "b"], ["x", "y"], 2)) == [
        ("a", "x", 0), ("a", "y", 0), ("a", "y", 1), ("a", "x", 1),
        ("b", "x", 0), ("b", "y", 0), ("b", "y", 1), ("b", "x", 1),
    ]  # fmt: skip


def test_a_report_that_waits_is_not_decided() -> None:
    features = {"a": {"path": "on"}, "b": {"path": "pending"}}
    assert not decided({"features": features})
    assert decided({"features": {"a": features["a"]}})


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Any]]:
    """Stock and ours, few steps."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WARMUP", 2), ("TIMED", 4), ("LOGGED", 2)):
            patch.setattr(side_by_side, name, value)
        yield {side: measure_side(SMALL, side, "cpu", 0) for side in ("stock", "fastpack")}


def test_sides_train_the_same_tokens_to_the_same_losses(measured: dict[str, Any]) -> None:
    stock, ours = measured["stock"], measured["fastpack"]
    assert stock["timed_tokens"] == ours["timed_tokens"] > 0
    assert stock["warmup_steps"] == ours["warmup_steps"] == 2
    assert list(stock["losses"]) == list(ours["losses"]) == ["2", "4", "6"]
    for step, loss in stock["losses"].items():
        assert ours["losses"][step] == pytest.approx(loss, rel=1e-3)
    for found in measured.values():
        assert len(found["step_seconds"]) == 4
        assert min(found["step_seconds"]) > 0
        assert found["first_step_seconds"] > 0
    assert ours["report"]["features"]["packed_attention"]["path"] == "per_document"


def record_of(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"case": "side_by_side", "rows": entries, "machine": {"device": "cuda", "gpu": "X"}, "date": "2026-01-01"}


def entry(side: str, seconds: float, loss: float = 2.0, row: str = "qwen3", **more: Any) -> dict[str, Any]:
    figures = {
        "timed_tokens": 1200, "step_seconds": [seconds] * 12, "losses": {"6": loss}, "profile": {}, "peak_gib": 1.0,
        "first_step_seconds": 1.0,
    }  # fmt: skip
    return {"row": row, "side": side, "round": 0, **figures, **more}


def test_times_are_believed_where_losses_are_stocks_and_where_stock_leaks() -> None:
    entries = [
        entry("stock", 1.0),
        entry("fastpack", 0.5, 2.0 * (1 + LOSS_BUDGET / 2)),
        entry("stock compiled", 0.8, 2.1),
    ]
    entries += [entry("stock", 1.0, row="gpt-oss"), entry("fastpack", 0.25, 3.0, row="gpt-oss")]
    entries.append({"row": "qwen3", "side": "stock + Liger", "round": 0, "failed": "Traceback\nImportError: no Liger"})
    found = cells(record_of(entries))
    assert believed("qwen3", found["qwen3"]["stock"], found["qwen3"]["fastpack"])
    assert not believed("qwen3", found["qwen3"]["stock"], found["qwen3"]["stock compiled"])
    assert (found["qwen3"]["fastpack"].rate, found["qwen3"]["stock"].rate) == (200, 100)
    text = table(record_of(entries))
    assert "| qwen3 | fastpack | 200 | 200 to 200 | 2.00 |" in text
    assert "| qwen3 | stock compiled | 125 | 125 to 125 | losses differ | 5.0e-02 |" in text
    assert "| gpt-oss | fastpack | 400 | 400 to 400 | 4.00 |" in text
    assert "| qwen3 | stock + Liger | ImportError: no Liger |" in text


def test_the_file_grows_run_by_run_and_a_failing_side_is_an_entry(
    tmp_path: Path, measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(row: str, side: str, seed: int, seconds: float) -> dict[str, Any]:
        asked.append(side)
        return dict(measured[side]) if side in measured else {"failed": "OutOfMemoryError: too large"}

    monkeypatch.setattr(side_by_side, "_run", answer)
    file = ResultFile(tmp_path / "sides.json")
    options: dict[str, Any] = {"rounds": 1, "seed": 0, "file": file, "progress": False}
    record = measure([SMALL.name], ["stock", "stock compiled"], **options)
    record = measure([SMALL.name], ["stock", "stock compiled", "fastpack"], **options)
    assert asked == ["stock", "stock compiled", "fastpack"]
    file.save(record)
    assert "OutOfMemoryError: too large" in table(json.loads(file.path.read_text()))
    pytest.importorskip("matplotlib")
    main(["--report", str(file.path), "--plot", str(tmp_path / "sides.png")])
    assert (tmp_path / "sides.png").read_bytes().startswith(b"\x89PNG")
    for rows, sides in ((["smal lora 512"], ["stock"]), ([SMALL.name], ["stok"])):
        with pytest.raises(UserError, match="there is no"):
            measure(rows, sides, **options)
