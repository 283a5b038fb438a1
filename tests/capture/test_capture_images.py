"""Runs on images whose decoder is captured below its eager tower: equal to eager runs and to TRL, step by step."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import CAPTURED, At
from peft import LoraConfig
from side_by_side import assert_equal
from trainer_material import assert_line, callback, figures
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.capture import slot
from fastpack_trl.model.facts import backbones

LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)}
Steps = list[dict[str, Any]]
"""The gradients of each step by name; None of a parameter without one."""


def train(folder: Path, devices: Any, family: str, cls: Any = FastSFTTrainer, **fields: Any) -> tuple[Any, Steps]:
    """A run of few images per step; of ours it is captured."""
    steps: Steps = []

    def keep(state: Any, model: Any) -> None:
        own = model.named_parameters()
        steps.append({name: None if p.grad is None else p.grad.clone() for name, p in own if p.requires_grad})

    config = FastSFTConfig if cls is FastSFTTrainer else SFTConfig
    base = {"max_steps": 14, "per_device_train_batch_size": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    base |= {"weight_decay": 0.1} | (CAPTURED if cls is FastSFTTrainer else {})
    fields["callbacks"] = [callback("on_pre_optimizer_step", keep)(), *fields.get("callbacks", ())]
    data, model = image_data(12, family=family), composite(family, torch.float64)
    if fields.pop("freeze", False):
        model.get_decoder().requires_grad_(False)
    trainer = run(cls, config, folder, family, model, data, train=False, **base | fields)
    devices.options["model"] = trainer.model
    trainer.train()
    return trainer, steps


def assert_same_steps(ours: Steps, eager: Steps) -> None:
    assert len(ours) == len(eager) > 0
    for step, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        absent = [{name for name, gradient in found.items() if gradient is None} for found in (mine, theirs)]
        assert absent[0] == absent[1], step
        for name, gradient in theirs.items():
            if gradient is not None:
                torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=f"step {step}: {name}")


RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{family: (family, {}, {}) for family in ("qwen2_5_vl", "llava", "mistral3", "internvl", "smolvlm", "qwen3_5")},
    "qwen2_5_vl-lora": ("qwen2_5_vl", LORA, {"fused_layers": "on"}),
    "llava-lora": ("llava", LORA | {"gradient_checkpointing": True}, {}),
    "accumulated": ("qwen2_5_vl", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {}),
    "projector": ("llava", {"freeze": True}, {}),
    "evaluated": ("mistral3", {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": image_data(4)}, {}),
}
"""Family, options of a run, and fields of ours."""


@pytest.mark.parametrize("case", RUNS)
def test_a_captured_run_on_images_trains_as_an_eager_one_and_as_trl(case: str, tmp_path: Path, devices: Any) -> None:
    """Gradients of each step, also None of a tower in a step without images: AdamW would decay it for zeros."""
    family, fields, fast = RUNS[case]
    ours, mine = train(tmp_path / "on", devices, family, **fields, **fast)
    eager, theirs = train(tmp_path / "off", devices, family, cuda_graph="off", **fields, **fast)
    stock, _ = train(tmp_path / "trl", devices, family, SFTTrainer, **fields)
    assert_line(ours, "cuda_graph", "graphs of 3.00 GiB", status="on", path="captured")
    assert devices.made[0].log.count("replay") >= 8, devices.made[0].log
    assert "forward" not in vars(backbones(ours.model)[-1])
    assert_same_steps(mine, theirs)
    assert_equal(figures(ours), figures(eager), rtol=1e-5, atol=1e-6)
    assert_equal(figures(ours), figures(stock), rtol=5e-4, atol=1e-5)
