"""Runs on few images whose decoder is captured, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from captured_material import CAPTURED
from peft import LoraConfig
from trainer_material import callback
from trl import SFTConfig
from vision_material import composite, image_data
from vision_runs import run

from fastpack_trl import FastSFTConfig, FastSFTTrainer

LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)}
Steps = list[dict[str, torch.Tensor]]
"""The gradients of each step by name."""


def train(folder: Path, devices: Any, family: str, cls: Any = FastSFTTrainer, **fields: Any) -> tuple[Any, Steps]:
    """A run of few images per step; of ours it is captured, and `devices.without` are steps replayed without images."""
    steps: Steps = []
    replays, devices.without = 0, list[int]()

    def keep(state: Any, model: Any) -> None:
        nonlocal replays
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        before, replays = replays, devices.made[-1].log.count("replay") if devices.made else 0
        devices.without += [state.global_step] * (replays > before and len(steps[-1]) < max(map(len, steps)))

    config = FastSFTConfig if cls is FastSFTTrainer else SFTConfig
    base = {"max_steps": 18, "per_device_train_batch_size": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    base |= {"weight_decay": 0.1} | (CAPTURED if cls is FastSFTTrainer else {})
    fields["callbacks"] = [callback("on_pre_optimizer_step", keep)(), *fields.get("callbacks", ())]
    data, model = fields.pop("data", None) or image_data(12, family=family), composite(family, torch.float64)
    fields.pop("prepare", lambda model: None)(model)
    if fields.pop("freeze", False):
        model.get_decoder().requires_grad_(False)
    trainer = run(cls, config, folder, family, model, data, train=False, **base | fields)
    devices.options["model"], devices.run = trainer.model, getattr(trainer, "fastpack_run", None)
    trainer.train()
    return trainer, steps
