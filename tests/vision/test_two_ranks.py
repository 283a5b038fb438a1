"""Rows of images on two ranks, of which one has no image in some steps: DDP and FSDP 2."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fsdp2, two_ranks
from side_by_side import assert_equal
from trainer_material import assert_line, figures
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer

FIELDS = {
    "per_device_train_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "max_steps": 3,
    "learning_rate": 0.1,
}


@pytest.mark.slow
@two_ranks
def test_two_ranks_learn_as_trls_under_ddp() -> None:
    dist.init_process_group("gloo")
    for family in ("qwen2_5_vl", "gemma3"):
        model, data = composite(family, torch.float64), image_data(family=family)  # 0, 1 and 2 images in turn
        for more in ({}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}):
            stock = run(SFTTrainer, SFTConfig, Path("stock"), family, model, data, **FIELDS, **more)
            ours = run(FastSFTTrainer, FastSFTConfig, Path("ours"), family, model, data, **FIELDS, **more)
            assert_line(ours, "sync_free", path="loss, metrics, host work")
            print("RESULT", family, differences(ours, stock))
            assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
            assert differences(ours, stock) < 3e-6


LAYERS = {"gemma3": ["Gemma3DecoderLayer", "SiglipEncoderLayer"]}
"""Names for accelerate, which otherwise looks for classes that the model does not have."""


def sharded(cls: Any, config: Any, family: str, model: Any, data: Any, **fields: Any) -> Any:
    trainer = run(cls, config, Path(cls.__name__), family, model, data, train=False, **fields)
    with fsdp2(trainer, transformer_cls_names_to_wrap=LAYERS.get(family)):
        trainer.train()
    return trainer


@pytest.mark.slow
@two_ranks
def test_two_ranks_learn_as_trls_under_fsdp2() -> None:
    """If a rank has no image, TRL's wait for each other in the tower: its run under DDP is compared with there.

    The head is frozen: TRL gathers it past its unit, and its gradient is that of one rank.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = {1: ("qwen2_5_vl", "mistral3", "gemma3"), None: ("qwen2_5_vl", "qwen3_vl", "gemma3")}
    for images, family in ((images, family) for images, families in cases.items() for family in families):
        model, data = composite(family), image_data(family=family, images=images)
        model.lm_head.requires_grad_(False)
        more = FIELDS | {"eval_dataset": data.select(range(4)), "eval_strategy": "steps", "eval_steps": 2}
        ours = sharded(FastSFTTrainer, FastSFTConfig, family, model, data, **more)
        own = sharded if images else partial(run, folder=Path("stock"))
        stock = own(SFTTrainer, SFTConfig, family=family, model=model, data=data, **more)
        assert_line(ours, "sync_free", path="loss, metrics, host work")
        assert_equal(figures(ours), figures(stock), rtol=1e-5, atol=1e-6)
