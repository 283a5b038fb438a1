"""The activation plan of a run on images: it counts the tower, and its row is that of `image_row_tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import assert_equal
from torch.autograd.graph import saved_tensors_hooks
from trainer_material import assert_line, figures
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.checkpointing.tower import kept_by_tower, tower_bytes
from fastpack_trl.model.facts import backbones
from fastpack_trl.vision.rows import OF_IMAGES


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_bytes_of_a_tower_are_those_that_autograd_keeps(family: str, tmp_path: Path) -> None:
    model = composite(family)
    trainer = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, image_data(family=family), train=False)
    batch = trainer.data_collator([dict(example) for example in image_data(family=family)])
    images = {name: batch[name] for name in OF_IMAGES & batch.keys()}
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *images.values())}
    saved: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        features = backbones(model)[0].get_image_features(**images, return_dict=True)
    whole = sum(storage.nbytes() for storage in saved.values())
    assert features is not None
    counted = kept_by_tower(model, images, checkpoints=False)
    assert counted == pytest.approx(whole, rel=0.02)
    assert kept_by_tower(model, images, checkpoints=True) < 0.8 * counted
    model.requires_grad_(False)
    assert kept_by_tower(model, images, checkpoints=False) == 0
    assert tower_bytes(trainer.fastpack_run) > 0


def test_a_plan_counts_the_tower_and_the_row_of_samples(tmp_path: Path) -> None:
    model, data = composite("qwen3_vl", torch.float64), image_data(family="qwen3_vl")
    step = {"max_steps": 1, "per_device_train_batch_size": 8}
    stock = run(SFTTrainer, SFTConfig, tmp_path, "qwen3_vl", model, data, **step)
    planned = {"activation_memory": "checkpoint", "activation_memory_gib": 1.0, "image_row_tokens": 70}
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "qwen3_vl", model, data, **step, **planned)
    assert_line(ours, "activation_memory", "GiB for the tower of images", status="on", path="checkpoint")
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6


def test_rows_of_any_length_have_no_plan_and_the_line_names_the_fix(tmp_path: Path) -> None:
    why = "no plan can be made: rows of images may have any length: set image_row_tokens"
    for family in ("llava", "qwen3_vl"):
        model, data = composite(family), image_data(family=family)
        ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, max_steps=1, activation_memory_gib=1.0)
        assert ours.fastpack_report["activation_memory"].reason == why
    with pytest.raises(ValueError, match=f"activation_memory='checkpoint': {why}"):
        run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, activation_memory="checkpoint")
