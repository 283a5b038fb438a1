"""The comparison over several GPUs: its verdict, its record, and what the README says of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/several_gpus_cuda_2026-11-22.json"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("several_gpus", ROOT / "benchmarks/several_gpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["several_gpus"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


several_gpus = _script()
CASES = {case.name: case for case in several_gpus.CASES}


def _side(loss: float, steps: int = several_gpus.STEPS) -> dict[str, Any]:
    return {"losses": [loss] * steps}


@pytest.mark.parametrize(
    ("name", "stock", "ours", "passed"),
    [
        ("ddp full", _side(2.0), _side(2.001), True),
        ("ddp full", _side(2.0), _side(2.01), False),
        ("ddp full", _side(2.0), _side(float("nan")), False),
        ("ddp full", {"error": "ended with 1"}, _side(2.0), False),
        ("ddp full", _side(2.0), {"error": "ended with 1"}, False),
        ("ddp full", _side(2.0), _side(2.0, steps=3), False),
        ("ddp gpt-oss", _side(2.0), _side(3.0), True),  # stock's documents see each other: finishing is what counts
        ("fsdp2 full checkpoints", {}, _side(2.0) | {"checkpoints": {"losses_apart": 0.0, "loaded_apart": 1e-4}}, True),
        ("fsdp2 full checkpoints", {}, _side(2.0) | {"checkpoints": {"losses_apart": 0.0, "loaded_apart": 0.1}}, False),
        ("fsdp2 full checkpoints", {}, _side(2.0) | {"checkpoints": {"losses_apart": 0.0}}, False),
        ("ddp gpt-oss", _side(2.0), {"error": "had not ended after 180 s"}, False),
    ],
)
def test_a_case_passes_when_ours_finished_with_stock_s_losses(
    name: str, stock: dict[str, Any], ours: dict[str, Any], passed: bool
) -> None:
    row = {"name": name, "stock": stock, "fastpack": ours}
    several_gpus.judge(CASES[name], row)
    assert row["passed"] is passed


def test_every_case_of_the_record_passed_and_the_readme_says_how_far_losses_are_apart() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in record["rows"]}
    assert record["complete"]
    assert rows.keys() <= CASES.keys()
    for name, row in rows.items():
        again = {side: row[side] for side in several_gpus.SIDES}
        several_gpus.judge(CASES[name], again)
        assert again["passed"]
        assert again["largest_difference"] == row["largest_difference"]
        assert all(row[side]["sharded"] == CASES[name].fsdp for side in several_gpus.SIDES)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    apart = {name: row["largest_difference"] for name, row in rows.items()}
    assert max(apart["fsdp2 full"], apart["fsdp2 lora"]) == 0
    dense = max(apart["ddp full"], apart["ddp lora"])
    assert f"{dense:.1e} under DDP, and {apart['ddp qwen3-moe']:.1e} with Qwen3-MoE" in readme
