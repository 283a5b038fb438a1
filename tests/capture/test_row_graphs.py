"""Trainers that score completions, their layers captured: equal to the same runs without, and what makes them eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_same, build, trained

import fastpack_trl
from fastpack_trl.capture.rows import RowGraphs

STEPS = 28
CAPTURED = {"packed_attention": "varlen", "cuda_graph": "on", "share_prefixes": "auto"}


def run(name: str, folder: Path, devices: Any, **options: Any) -> Any:
    """A finished run of ours; the graphs of its device are in ``devices.made``."""
    settings = {"max_steps": STEPS, "eval_steps": STEPS, "gradient_checkpointing": False, **CAPTURED, **options}
    config = getattr(fastpack_trl, f"Fast{name}Config")
    made = build(name, folder, fast=True, config=config, **settings)
    devices.options["model"] = made.model
    made.train()
    return made


def both(name: str, folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    return (
        run(name, folder / "on", devices, **options),
        run(name, folder / "off", devices, **options | {"cuda_graph": "off"}),
    )


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_captured_runs_equal_eager_ones(name: str, lora: bool, tmp_path: Path, devices: Any) -> None:
    ours, eager = both(name, tmp_path, devices, lora=lora)
    assert "replay" in devices.made[0].log
    assert ours.fastpack_report["cuda_graph"].path == "captured"
    assert_same(ours, eager)
    expected = trained(eager.model)
    for key, value in trained(ours.model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
    ],
)
def test_settings_of_a_run(options: dict[str, Any], tmp_path: Path, devices: Any) -> None:
    ours, eager = both("DPO", tmp_path, devices, **options)
    assert "replay" in devices.made[0].log
    assert_same(ours, eager)


def test_reference_and_policy_have_graphs_of_their_own(tmp_path: Path, devices: Any) -> None:
    made = run("DPO", tmp_path, devices)
    assert devices.made[0].log.count("record") >= 3  # forward and backward of the policy, forward of the reference
    assert made.fastpack_run.part(RowGraphs) is None
