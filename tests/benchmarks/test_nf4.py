"""``python -m benchmarks.nf4`` in miniature, on the CPU: the torch twin beside bitsandbytes."""

from __future__ import annotations

import pytest

from benchmarks import nf4
from benchmarks.cases import Run


def test_a_miniature_run_times_both_sides_alone_and_before_a_product() -> None:
    pytest.importorskip("bitsandbytes")
    record = nf4.measure(Run(rounds=2), {"tiny": (64, 128)}, tokens=(8,))
    alone, product = record["rows"]
    assert set(alone["sides"]) == {nf4.STOCK, nf4.OURS}
    assert set(product["sides"]) == {nf4.STOCK, nf4.OURS, nf4.KEPT}
    assert alone["bytes"] == 64 * 64 + (64 * 128 // 64 + 4) + 2 * 64 * 128
    assert all(side["seconds"]["median"] > 0 for row in record["rows"] for side in row["sides"].values())
    assert alone["ratios"][nf4.STOCK]["median"] > 0
    assert nf4.STOCK in nf4.table(record)
