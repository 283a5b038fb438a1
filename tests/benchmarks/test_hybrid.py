"""``python -m benchmarks.hybrid`` in miniature, on the CPU, eager."""

from __future__ import annotations

import json

import pytest

from benchmarks import hybrid
from benchmarks.cases import Run
from benchmarks.results_folder import RESULTS


def test_a_miniature_run_times_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    family, fields = hybrid.MODELS["delta"]
    small = {**fields, "hidden_size": 32, "intermediate_size": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    monkeypatch.setitem(hybrid.MODELS, "delta", (family, small))
    record = hybrid.measure(Run(rounds=2), {"tiny": ("delta", (70, 9))})
    (row,) = record["rows"]
    assert not row["failed"]
    assert set(row["sides"]) == {hybrid.STOCK, hybrid.OURS}
    assert row["padding_factor"] == pytest.approx(140 / 79)
    assert all(side["seconds"]["median"] > 0 for side in row["sides"].values())
    assert f"{hybrid.STOCK} / {hybrid.OURS}" in hybrid.table(record)


EAGER = f"{hybrid.STOCK} / {hybrid.OURS}"
COMPILED = {f"{hybrid.STOCK} / {hybrid.OURS_COMPILED}": 1.5, f"{hybrid.STOCK_COMPILED} / {hybrid.OURS_COMPILED}": 1.3}
# Stock's Mamba-2 on a CPU multiplies out what a product of matrices sums, so that any packed row is many times as fast:
# the floor is half of what documents of equal length gained, which have no padding to save. Ours twice as slow is seen.
FLOORS = {
    "delta": 1.25, "delta, equal lengths": 0.95, "mamba2": 10.0, "mamba2, equal lengths": 10.0, "qwen3.5-4b": 1.25,
}  # fmt: skip
"""How many times as fast as stock's padded batch a packed row is at least, by row of a record."""


def test_the_recorded_rows_are_above_their_floors() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("hybrid_*.json"))]
    rows = [row for record in records for row in record["rows"]]
    assert {row["setting"] for row in rows} >= FLOORS.keys()
    for row in rows:
        assert not row["failed"], row["setting"]
        floors = {EAGER: FLOORS[row["setting"].removesuffix(", compiled")], **COMPILED}
        for ratio, found in row["ratios"].items():
            assert found["low"] >= floors.get(ratio, 0.0), (row["setting"], ratio)
