"""Trainers over a base in FP8, by the reference on the CPU, and what to look at in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lora_material import adapted
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import FineGrainedFP8Config, TrainerCallback
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.testing import tiny_model

LAYERS = 14


def made(folder: Path, model: Any = None, callbacks: Any = (), **fields: Any) -> FastSFTTrainer:
    args = FastSFTConfig(**settings(folder, **({"packing": True, "frozen_base": "fp8"} | fields)))
    return FastSFTTrainer(
        adapted("qwen3") if model is None else model,
        args=args,
        train_dataset=make_dataset("text"),
        eval_dataset=make_dataset("text", 8, seed=7),
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )


def fp8_checkpoint() -> Any:
    """A model as transformers loads an FP8 checkpoint with scales per block, with LoRA on all projections."""
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 128}
    model = tiny_model("qwen3", num_attention_heads=1, num_key_value_heads=1, **shape)
    replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config())
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.to_empty(device="cpu")
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def assert_as_loaded(model: Any, before: list[Tensor]) -> None:
    """Nothing of FP8 is left of a run, and the bases have the `weights` of before it."""
    assert not fast_layers(model)
    for layer, weight in zip(lora_layers(model), before, strict=True):
        assert torch.equal(layer.base_layer.weight, weight)
        assert not any(name.startswith("fastpack") for name in vars(layer))


def fast_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FastLora)]


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def weights(model: Any) -> list[Tensor]:
    return [layer.base_layer.weight.detach().clone() for layer in lora_layers(model)]


class At(TrainerCallback):
    """Calls a function once, at the end of the first step."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.found: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.found = self.function(kwargs["model"])
