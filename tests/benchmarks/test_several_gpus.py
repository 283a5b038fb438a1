"""The comparison over several GPUs: its verdict, its record, and what the README says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import several_gpus

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


def test_the_readme_says_how_far_losses_are_apart_and_how_long_steps_take() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    ddp, fsdp = _rows(DDP), _rows(FSDP)
    commit = {file: _record(file)["source"]["commit"][:7] for file in (DDP, FSDP)}
    dense = max(ddp[name]["largest_difference"] for name in ("ddp full", "ddp lora"))
    experts = ddp["ddp qwen3-moe"]["largest_difference"]
    assert (
        f"Under DDP the difference was {dense:.1e}, and {experts:.1e} with Qwen3-MoE, "
        f"at the older commit {commit[DDP]} (`{DDP.relative_to(ROOT).as_posix()}`)"
    ) in readme
    assert f"Medians of the last steps, at commit {commit[FSDP]};" in readme
    assert f"from stock's is {max(row['largest_difference'] for row in fsdp.values()):.1e}: FSDP 2" in readme
    for work, name in (("Qwen3-0.6B all weights", "fsdp2 full"), ("Qwen3-8B (12 of its layers) LoRA", "fsdp2 8b lora")):
        row = fsdp[name]
        stock, compiled, ours = (f"{row[side]['last_step_ms']:.0f}" for side in ("stock", "stock compiled", "fastpack"))
        peaks = " / ".join(f"{max(row[side]['peak_gib']):.1f}" for side in several_gpus.SIDES)
        line = f"| {work} | {stock} | {compiled} | {ours} (**{row['times_stock']:.1f}x**) | {peaks} GiB |"
        assert line in readme
