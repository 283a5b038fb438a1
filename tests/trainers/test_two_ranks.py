"""Two ranks on the CPU: every trainer under DDP, and under FSDP 2, logs and learns what stock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preference_material
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from preference_material import DATA, NAMES, assert_changed_alike, assert_same
from ranks import fsdp2, two_ranks
from trainer_material import assert_line

pytestmark = pytest.mark.slow

SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 0.03}
STEPS = {**SGD, "max_steps": 3, "eval_steps": 3, "per_device_train_batch_size": 4}


def both(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    ours, stock = preference_material.both(name, Path(name), **{**STEPS, **options})
    report = ours.fastpack_report
    assert report["batches"].status == "on", report.table()
    assert ours._fastpack_rows.ran >= 3, report.table()
    assert ours._fastpack_rows.missed == 0
    assert ours.accelerator.num_processes == 2
    assert_same(ours, stock, atol=2e-5, rtol=2e-5)
    return ours, stock


@pytest.mark.parametrize("name", [name for name in NAMES if name != "RLOO"])  # which shares all with GRPO
@two_ranks
def test_two_ranks_under_ddp_log_and_learn_what_stock_does(name: str) -> None:
    """All weights, and adapters with accumulation."""
    for options in ({"lora": False}, {"gradient_accumulation_steps": 2}):
        ours, stock = both(name, **options)
        assert_changed_alike(ours, stock)
    if name == "GRPO":
        assert_line(ours, "merge_accumulation", "each process")


@two_ranks
def test_two_ranks_compute_the_reference_before() -> None:
    """Of data on disk, where both ranks have the cache that the first one writes."""
    PartialState()  # starts the group
    for name in ("DPO", "KTO"):
        if not dist.get_rank():
            DATA[name]().save_to_disk(f"{name}-data")
            DATA[name](8, seed=7).save_to_disk(f"{name}-evaluated")
        dist.barrier()
        data, evaluated = (Dataset.load_from_disk(f"{name}-{each}") for each in ("data", "evaluated"))
        both(name, data=data, evaluated=evaluated, precompute_ref_log_probs=True)


@two_ranks
def test_two_ranks_evaluate_a_stream_that_one_of_them_reads() -> None:
    """Of equal widths, as accelerate joins the batches of all ranks."""
    widths: dict[str, Any] = {"pad_to_multiple_of": 64, "max_length": 64, "per_device_eval_batch_size": 2}
    ours, _ = both("DPO", evaluated=DATA["DPO"](16, seed=7).to_iterable_dataset(num_shards=1), **widths)
    assert_line(ours, "batches", "padded by TRL if accelerate sends the batches of a stream", status="on")


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
@two_ranks
def test_two_ranks_under_fsdp2_log_what_stock_logs(name: str) -> None:
    ours, _ = both(name, around=fsdp2, eval_strategy="no", gradient_checkpointing=False)
    assert type(ours.model).__name__.startswith("FSDP"), type(ours.model)
    assert_line(ours, "verify_packing", status="on", path="passed")
