"""Runs on images, and the difference of their steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trainer_material import settings
from vision_material import processor


def run(
    cls: Any, config: Any, folder: Path, family: str, model: Any, data: Dataset,
    resume: bool = False, train: bool = True, **fields: Any,
) -> Any:  # fmt: skip
    own = ("peft_config", "eval_dataset", "callbacks", "data_collator", "ref_model")
    more = {name: fields.pop(name) for name in own if name in fields}
    base = {"max_length": None, "max_steps": 2, "eval_strategy": "no", "optim": "sgd", "learning_rate": 1.0}
    base |= {"max_grad_norm": 1e9, "lr_scheduler_type": "constant"}
    args = config(**settings(folder, **base | fields))
    torch.manual_seed(0)
    trainer = cls(copy.deepcopy(model), args=args, train_dataset=data, processing_class=processor(family), **more)
    trainer.before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if train:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def differences(ours: Any, stock: Any) -> float:
    """Largest difference of a gradient (of an SGD step), relative to the largest number of its parameter's."""
    mine = dict(ours.model.named_parameters())
    steps = {name: stock.before[name] - p.detach() for name, p in stock.model.named_parameters()}
    floor = 1e-6 * max(float(step.abs().max()) for step in steps.values())
    return max(
        float((step - (stock.before[name] - mine[name].detach())).abs().max() / max(float(step.abs().max()), floor))
        for name, step in steps.items()
    )
