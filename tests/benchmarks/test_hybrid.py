"""``python -m benchmarks.hybrid`` in miniature, on the CPU, eager."""

from __future__ import annotations

import pytest

from benchmarks import hybrid
from benchmarks.cases import Run


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
