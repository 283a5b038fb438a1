"""Trainers that score completions, their layers captured: equal to the same runs without, and what makes them eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from preference_material import assert_same, build, trained

import fastpack_trl

CAPTURED = {"packed_attention": "varlen", "cuda_graph": "on", "share_prefixes": "auto"}


def run(name: str, folder: Path, devices: Any, around: Callable[[Any], Any] = lambda made: None, **options: Any) -> Any:
    """A finished run of ours, which `around` has changed before; the graphs of its device are in ``devices.made``."""
    settings = {"max_steps": 8, "eval_steps": 8, "gradient_checkpointing": False, **CAPTURED, **options}
    config = getattr(fastpack_trl, f"Fast{name}Config")
    made = build(name, folder, fast=True, config=config, **settings)
    devices.options["model"] = made.model
    around(made)
    made.train()
    return made


def both(name: str, folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    ours = run(name, folder / "on", devices, **options)
    return ours, run(name, folder / "off", devices, **options | {"cuda_graph": "off"})


def uneven_completions() -> Dataset:
    """Completions whose rows outgrow each other's buckets: KTO scores some while a forward waits for its backward."""
    draw = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "went", "home", "to", "eat", "some", "fish"]

    def text(most: int) -> str:
        return " " + " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    rows = [{"prompt": text(20), "completion": text(60), "label": draw.random() < 0.5} for _ in range(64)]
    return Dataset.from_list(rows)


RUNS: dict[str, dict[str, Any]] = {
    **{key: {"lora": True} for key in ("DPO-lora", "Reward-lora", "GRPO")},
    **{key: {"lora": False} for key in ("Reward-full", "RLOO")},
    "DPO-full": {"lora": False, "gradient_checkpointing": True},
    "DPO-accumulated": {"lora": True, "gradient_accumulation_steps": 2},
    "KTO-uneven": {"lora": True, "data": uneven_completions(), "max_steps": 32},
    "Reward-named": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")}},
    "Reward-head": {"lora": False, "around": lambda made: made.model.model.requires_grad_(False)},
}


@pytest.mark.parametrize("case", RUNS)
def test_captured_runs_equal_eager_ones(case: str, tmp_path: Path, devices: Any) -> None:
    """Also a reward model whose score alone trains."""
    name, options = case.partition("-")[0], RUNS[case]
    ours, eager = both(name, tmp_path, devices, **options)
    log = devices.made[0].log
    assert "replay" in log
    # Forward and backward of the policy, and the forward of a reference.
    assert log.count("record") >= (3 if name == "DPO" else 1 if "around" in options else 2)
    report = ours.fastpack_report
    assert (report["cuda_graph"].path, report["share_prefixes"].path) == ("captured", "prompts once")
    assert ours.fastpack_run.graphs is None
    assert_same(ours, eager)
    expected = trained(eager.model)
    for key, value in trained(ours.model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
