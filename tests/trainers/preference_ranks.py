"""Trains stock and ours on two ranks under DDP and FSDP 2, for `test_two_ranks.py`: whole runs of `train`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from fsdp2 import fsdp2
from preference_material import DATA, assert_changed_alike, assert_same, build, trained
from ranks import leave

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/tmp")
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 0.03}
STEPS = {**SGD, "max_steps": 3, "eval_steps": 3, "per_device_train_batch_size": 4}


def both(name: str, where: str, **options: Any) -> tuple[Any, Any]:
    made = []
    for fast in (True, False):
        folder = FOLDER / f"{name}-{where}-{fast}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        runner = build(name, folder, fast=fast, **{**STEPS, **options})
        runner.weights_before = trained(runner.model)
        around: Any = fsdp2(runner) if where == "fsdp2" else contextlib.nullcontext(runner)
        with around:
            runner.train()
        made.append(runner)
    ours, stock = made
    report = ours.fastpack_report
    assert report["batches"].status == "on", report.table()
    assert ours._fastpack_rows.ran >= 3, report.table()
    assert ours._fastpack_rows.missed == 0
    assert ours.accelerator.num_processes == 2
    assert_same(ours, stock, atol=2e-5, rtol=2e-5)
    return ours, stock


def ddp(name: str) -> None:
    for options in ({"lora": False}, {"gradient_accumulation_steps": 2}):
        ours, stock = both(name, "ddp", **options)
        assert_changed_alike(ours, stock)
    if name in ("GRPO", "RLOO"):
        line = ours.fastpack_report["merge_accumulation"]
        assert "each process" in line.reason, line


def precomputed() -> None:
    """Of data on disk, where both ranks have the cache that the first one writes."""
    for name in ("DPO", "KTO"):
        if not dist.get_rank():
            DATA[name]().save_to_disk(str(FOLDER / name))
            DATA[name](8, seed=7).save_to_disk(str(FOLDER / f"{name}-evaluated"))
        dist.barrier()
        data, evaluated = (Dataset.load_from_disk(str(FOLDER / each)) for each in (name, f"{name}-evaluated"))
        both(name, "ddp", data=data, evaluated=evaluated, precompute_ref_log_probs=True)


def sharded(name: str) -> None:
    ours, _ = both(name, "fsdp2", eval_strategy="no", gradient_checkpointing=False)
    assert type(ours.model).__name__.startswith("FSDP"), type(ours.model)
    line = ours.fastpack_report["verify_packing"]
    assert (line.status, line.path) == ("on", "proof"), line


if __name__ == "__main__":
    what = sys.argv[2]
    if what == "precomputed":
        PartialState()  # starts the group
        precomputed()
    elif what == "fsdp2":
        sharded(sys.argv[3])
    else:
        ddp(what)
    leave()
