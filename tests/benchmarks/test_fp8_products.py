"""FP8 products: a run in miniature on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_products
from benchmarks.cases import Run
from benchmarks.fp8_products import BLOCK, quantise_blocks, table
from benchmarks.model_shapes import MODELS, ModelShape
from fastpack_trl.errors import UserError
from fastpack_trl.kernels.fp8 import FP8, LARGEST, quantise_rows_torch
from fastpack_trl.measure.record import write_json

TINY = ModelShape(
    "qwen3",
    {
        "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64,
    },
)  # fmt: skip


def test_groups_and_blocks_have_the_scale_of_their_largest_value() -> None:
    x = torch.randn(2 * BLOCK, 3 * BLOCK)
    by_groups, by_blocks = quantise_rows_torch(x, None, BLOCK), quantise_blocks(x)
    assert torch.allclose(by_groups.scales * LARGEST, x.abs().view(-1, 3, BLOCK).amax(-1))
    assert torch.allclose(by_blocks.scales * LARGEST, x.abs().view(2, BLOCK, 3, BLOCK).amax((1, 3)))
    for found in (by_groups, by_blocks):
        assert found.values.dtype == FP8
        assert (found.dense() - x).norm() < 0.04 * x.norm()


def test_a_miniature_run_times_layers_and_takes_errors(tmp_path: Path) -> None:
    record = fp8_products.measure(Run(rounds=2), {"tiny": TINY}, tokens=(48, 32))
    assert record["complete"]
    kinds = [row["kind"] for row in record["rows"]]
    assert kinds == ["layer"] * 2 + ["errors"] * 3  # q, k, v and o are of one shape
    layer = record["rows"][0]
    assert set(layer["sides"]) == {fp8_products.BF16, *fp8_products.CANDIDATES}
    assert not any("failed" in side for side in layer["sides"].values())
    weights = 4 * 128 * 128 + 3 * 128 * 256
    assert layer["flops"] == 4 * 48 * weights
    assert layer["sides"]["bf16"]["bytes"] == 2 * weights
    scales = 4 * weights // BLOCK**2
    assert layer["sides"]["block, transposed per use"]["bytes"] == weights + scales
    assert layer["sides"]["block, both layouts"]["bytes"] == 2 * (weights + scales)
    errors = record["rows"][2]["errors"]
    assert errors["bf16"]["none"]["forward"]["whole"] < 0.005
    for side in ("row", "block"):
        for way in ("forward", "backward"):
            assert 0.005 < errors[side]["none"][way]["whole"] < 0.06
    text = table(record)
    assert text.count("at least 1.35x: ") == 2
    file = tmp_path / "record.json"
    write_json(file, record)
    assert table(json.loads(file.read_text(encoding="utf-8"))) == text


def test_rows_that_the_seconds_do_not_reach_are_open() -> None:
    record = fp8_products.measure(Run(rounds=2, seconds=1e-9), {"tiny": TINY}, tokens=(32,))
    assert all("no time left" in row["skipped"] for row in record["rows"])
    assert "Seconds ran out" in table(record)


def test_a_model_without_whole_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="tiny-qwen3: dimensions of its projections are no multiples of 128"):
        fp8_products.measure(Run(rounds=2), {"tiny-qwen3": MODELS["tiny-qwen3"]}, tokens=(32,))
