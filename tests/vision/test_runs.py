"""`vision_tower` in runs: TRL's loss, gradients and log on images, for SFT and for trainers whose rows stay TRL's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_material import assert_line, assert_same_log, settings, train
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from vision_material import composite, image_data, processor

from fastpack_trl import FastDPOConfig, FastDPOTrainer, FastSFTConfig, FastSFTTrainer
from fastpack_trl.vision.tower import tower_attention

ON = "2 of 2 layers"


def run(cls: Any, config: Any, folder: Path, model: Any, data: Any, peft: Any = None, **fields: Any) -> Any:
    args = config(**settings(folder, **{"max_length": None, "max_steps": 4, "eval_strategy": "no", **fields}))
    more = {"ref_model": copy.deepcopy(model)} if issubclass(cls, DPOTrainer) else {"peft_config": copy.copy(peft)}
    trainer = cls(copy.deepcopy(model), args=args, train_dataset=data, processing_class=processor(), **more)
    trainer.train()
    return trainer


def assert_equal(ours: Any, stock: Any) -> None:
    assert_same_log(ours, stock)
    found = dict(ours.model.named_parameters())
    for name, parameter in stock.model.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6)
    assert {module.config._attn_implementation for module in tower_attention(ours.model)} == {"sdpa"}


@pytest.mark.parametrize(
    ("family", "lora", "more"),
    [
        ("qwen2_5_vl", False, {}),
        ("qwen2_5_vl", True, {"gradient_checkpointing": True}),
        ("qwen3_vl", False, {"gradient_accumulation_steps": 2}),
    ],
)
def test_sft_on_images_learns_as_stock(family: str, lora: bool, more: dict[str, Any], tmp_path: Path) -> None:
    model, data = composite(family), image_data()
    peft = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path / "ours", model, data, peft, vision_tower="on", **more)
    assert_equal(ours, run(SFTTrainer, SFTConfig, tmp_path / "stock", model, data, peft, **more))
    assert_line(ours, "vision_tower", ON, status="on", path="one call per image")


def test_dpo_on_images_learns_as_stock(tmp_path: Path) -> None:
    model, data = composite("qwen2_5_vl"), image_data(preferences=True)
    ours = run(FastDPOTrainer, FastDPOConfig, tmp_path / "ours", model, data)
    assert_equal(ours, run(DPOTrainer, DPOConfig, tmp_path / "stock", model, data))
    assert_line(ours, "vision_tower", ON, status="on")
    assert {module.config._attn_implementation for module in tower_attention(ours.ref_model)} == {"sdpa"}


def test_settings_and_models_without_it(tmp_path: Path) -> None:
    assert "vision_tower" not in train(FastSFTTrainer, tmp_path / "text", max_steps=1).fastpack_report
    model, data = composite("qwen3_vl"), image_data(4)
    fields = {"max_steps": 1}
    off = run(FastSFTTrainer, FastSFTConfig, tmp_path / "off", model, data, vision_tower="off", **fields)
    assert_line(off, "vision_tower", "switched off", status="off")
    model.set_attn_implementation("eager")
    own = run(FastSFTTrainer, FastSFTConfig, tmp_path / "eager", model, data, **fields)
    assert_line(own, "vision_tower", "attn_implementation='eager'", status="stock")
    with pytest.raises(ValueError, match=r"vision_tower='on': 0 of 2 layers .*eager.*; set vision_tower='auto'"):
        run(FastSFTTrainer, FastSFTConfig, tmp_path / "on", model, data, vision_tower="on", **fields)
