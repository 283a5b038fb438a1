"""The comparison over several GPUs: its verdict, its record, and what the README says of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import several_gpus
from benchmarks.losers import several_gpus_table

ROOT = Path(__file__).parents[2]
DDP = ROOT / "benchmarks/results/several_gpus_cuda_2026-11-22.json"
FSDP = DDP.with_stem(f"{DDP.stem}_fsdp2")


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


def _record(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def _rows(file: Path) -> dict[str, Any]:
    return {row["name"]: row for row in _record(file)["rows"]}


@pytest.mark.parametrize("file", [DDP, FSDP], ids=lambda file: file.stem)
def test_every_case_of_a_record_passed(file: Path) -> None:
    for name, row in _rows(file).items():
        again = {side: row[side] for side in several_gpus.SIDES if side in row}
        several_gpus.judge(CASES[name], again)
        assert again["passed"] is row["passed"] is True
        assert again["largest_difference"] == row["largest_difference"]
        assert all(row[side]["sharded"] == CASES[name].fsdp for side in again if side in several_gpus.SIDES)


def test_the_page_says_how_long_steps_take_and_how_far_losses_are_apart() -> None:
    for file in (DDP, FSDP):
        text = several_gpus_table(_record(file))
        for name, row in _rows(file).items():
            if "stock" not in row:
                continue
            sides = [row.get(side) for side in ("stock", "stock compiled", "fastpack")]
            steps = [side and median(side["step_ms"][-several_gpus.LAST :]) for side in sides]
            shown = " | ".join("-" if ms is None else f"{ms:,.0f}" for ms in steps)
            apart = row["largest_difference"]
            (line,) = [line for line in text.splitlines() if f" | {shown} | " in line]
            assert line.endswith(f"| {'-' if apart is None else f'{apart:.1e}'} |"), name
    row = _rows(FSDP)["fsdp2 8b lora"]
    (line,) = [line for line in several_gpus_table(_record(FSDP)).splitlines() if "Qwen3-8B" in line]
    assert line.startswith("| FSDP 2, Qwen3-8B (12 of its layers) LoRA | ")
    assert f" | {row['times_stock']:.2f} | {row['times_stock_compiled']:.2f} | " in line
