"""`vision_tower` in runs: TRL's loss, gradients and log on images, for SFT and for trainers whose rows stay TRL's."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_material import assert_line, assert_same_log, train
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import run

from fastpack_trl import FastDPOConfig, FastDPOTrainer, FastSFTConfig, FastSFTTrainer
from fastpack_trl.vision.tower import tower_attention

SFT = (FastSFTTrainer, FastSFTConfig), (SFTTrainer, SFTConfig)
DPO = (FastDPOTrainer, FastDPOConfig), (DPOTrainer, DPOConfig)
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("family", "trainers", "fields"),
    [
        ("qwen2_5_vl", SFT, {}),
        ("qwen2_5_vl", SFT, {"gradient_checkpointing": True, "peft_config": LORA}),
        ("qwen3_vl", SFT, {"gradient_accumulation_steps": 2}),
        ("qwen2_5_vl", DPO, {}),
    ],
)
def test_runs_on_images_learn_as_stock(family: str, trainers: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    (fast, fast_config), own = trainers
    model, pairs = composite(family), trainers is DPO

    def go(cls: Any, config: Any) -> Any:
        more: dict[str, Any] = {"ref_model": copy.deepcopy(model)} if pairs else {}
        more |= {"max_steps": 4, "learning_rate": 0.1, **fields}
        return run(cls, config, tmp_path / cls.__name__, "qwen2_5_vl", model, image_data(preferences=pairs), **more)

    ours, stock = go(fast, partial(fast_config, vision_tower="on")), go(*own)
    assert_same_log(ours, stock)
    found = dict(ours.model.named_parameters())
    for name, parameter in stock.model.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6)
    assert_line(ours, "vision_tower", "2 of 2 layers", status="on", path="one call per image")
    for each in filter(None, (ours.model, getattr(ours, "ref_model", None))):
        assert {module.config._attn_implementation for module in tower_attention(each)} == {"sdpa"}


def test_settings_and_models_without_it(tmp_path: Path) -> None:
    assert "vision_tower" not in train(FastSFTTrainer, tmp_path / "text", max_steps=1).fastpack_report
    model, data = composite("qwen3_vl"), image_data()
    go = partial(run, FastSFTTrainer, FastSFTConfig, tmp_path, "qwen2_5_vl", model, data, max_steps=1)
    assert_line(go(vision_tower="off"), "vision_tower", "switched off", status="off")
    model.set_attn_implementation("eager")
    assert_line(go(), "vision_tower", "attn_implementation='eager'", status="stock")
    with pytest.raises(ValueError, match=r"vision_tower='on': 0 of 2 layers .*eager.*; set vision_tower='auto'"):
        go(vision_tower="on")
