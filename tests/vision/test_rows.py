"""Rows of images and text: TRL's loss, gradients and log of the padded batch, by family; controls that differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trainer_material import assert_line, figures, settings
from trl import SFTConfig, SFTTrainer
from vision_material import COMPOSITES, composite, image_data, processor

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.vision.rows import FAMILIES


def run(cls: Any, config: Any, folder: Path, family: str, model: Any, data: Dataset, **fields: Any) -> Any:
    more = {name: fields.pop(name) for name in ("peft_config", "eval_dataset", "callbacks") if name in fields}
    base = {"max_length": None, "max_steps": 2, "eval_strategy": "no", "optim": "sgd", "learning_rate": 1.0}
    base |= {"max_grad_norm": 1e9, "lr_scheduler_type": "constant"}
    args = config(**settings(folder, **base | fields))
    own = copy.deepcopy(model)
    trainer = cls(own, args=args, train_dataset=data, processing_class=processor(family), **more)
    trainer.train()
    return trainer


def differences(ours: Any, stock: Any, before: Any) -> float:
    """Largest difference of a gradient, relative to the largest number of its parameter's."""
    start, mine = dict(before.named_parameters()), dict(ours.model.named_parameters())
    steps = {name: start[name] - p.detach() for name, p in stock.model.named_parameters()}
    floor = 1e-6 * max(float(step.abs().max()) for step in steps.values())
    return max(
        float((step - (start[name] - mine[name].detach())).abs().max() / max(float(step.abs().max()), floor))
        for name, step in steps.items()
    )


def logs_differ(ours: Any, stock: Any) -> float:
    keys = ("loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy")
    return max(
        abs(a[key] - b[key]) / max(1, abs(b[key]))
        for a, b in zip(figures(ours), figures(stock), strict=True)
        for key in keys
        if key in b
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_learn_as_padded_batches(family: str, tmp_path: Path) -> None:
    model, data = composite(family, torch.float64), image_data(family=family)
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, model, data, max_steps=1, per_device_train_batch_size=8)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, max_steps=1, per_device_train_batch_size=8)
    print(ours.fastpack_report.table())
    print(family, differences(ours, stock, model), logs_differ(ours, stock))
    assert ours.fastpack_run.plan.kind == "padding_free"
    assert differences(ours, stock, model) < 3e-6
    assert logs_differ(ours, stock) < 1e-6
    assert_line(ours, "vision_rows", status="on")
    assert set(COMPOSITES) == FAMILIES
