"""Two ranks over a base in FP8, for `test_frozen_base.py`: under DDP they train, under FSDP they are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2 import fsdp2
from lora_material import adapted
from ranks import leave
from trainer_material import make_dataset, make_tokenizer, settings

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.lora import frozen_base

FOLDER = Path(sys.argv[1])


def made() -> Any:
    options = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 3}
    return FastSFTTrainer(
        adapted("qwen3"), args=FastSFTConfig(**settings(FOLDER, **options), frozen_base="fp8"),
        train_dataset=make_dataset("text"), processing_class=make_tokenizer(),
    )  # fmt: skip


frozen_base._refused_by_device = lambda run: ""
trainer = made()
trainer.train()
line = trainer.fastpack_report["frozen_base"]
assert line.path == "fp8", str(trainer.fastpack_report)
adapters = torch.cat([own.detach().view(-1) for own in trainer.model.parameters() if own.requires_grad])
both = [torch.empty_like(adapters) for _ in range(2)]
dist.all_gather(both, adapters)
assert torch.equal(*both)

sharded = made()
with fsdp2(sharded):
    try:
        sharded.train()
    except ValueError as error:
        said = str(error)
    else:
        raise AssertionError("FSDP was not refused")
assert said.startswith("frozen_base='fp8': parameters are sharded while the step runs; train with DDP"), said
leave()
