"""Trainers over a base in FP8, by the reference on the CPU, and what to look at in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lora_material import adapted
from torch import Tensor
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import TrainerCallback

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.lora.linear import FastLora

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


def logged(trainer: FastSFTTrainer, name: str) -> list[float]:
    """The values of one figure of the log."""
    return [row[name] for row in trainer.state.log_history if name in row]


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
