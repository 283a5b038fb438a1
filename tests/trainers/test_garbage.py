"""A step leaves no tensor in a reference cycle: its memory would be free only after the next garbage collection."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_material import build
from transformers import TrainerCallback
from vision_material import composite, image_data
from vision_runs import run

from fastpack_trl import FastSFTConfig, FastSFTTrainer


def lora() -> dict[str, Any]:
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


class Garbage(TrainerCallback):
    """Collects what only the garbage collector frees of the second step."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.steps = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        self.steps += 1
        gc.set_debug(gc.DEBUG_SAVEALL if self.steps == 2 else 0)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        gc.set_debug(0)
        self.found += gc.garbage
        gc.garbage.clear()


@pytest.fixture
def garbage() -> Any:
    yield (made := Garbage())
    gc.set_debug(0)
    tensors = [each for each in made.found if isinstance(each, (torch.Tensor, torch.autograd.graph.Node))]
    assert made.steps > 2
    assert not tensors, [(type(each).__name__, getattr(each, "shape", "")) for each in tensors]


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2", "gpt_oss", "qwen3_moe"])
def test_text(family: str, adapts: bool, tmp_path: Path, garbage: Garbage) -> None:
    fast = {"fused_layers": "on", "packing": True, "gradient_checkpointing": adapts, "eval_strategy": "no"}
    given = {"callbacks": [garbage]} | (lora() if adapts else {})
    build(FastSFTTrainer, tmp_path, family=family, fast=fast, trainer=given).train()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_images(family: str, tmp_path: Path, garbage: Garbage) -> None:
    options = {"fused_layers": "on", "gradient_checkpointing": True, "max_steps": 3, "activation_memory_gib": 1.0}
    more = {"callbacks": [garbage], **lora()}
    run(
        FastSFTTrainer, FastSFTConfig, tmp_path, family, composite(family), image_data(family=family), **options, **more
    )
