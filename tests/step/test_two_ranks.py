"""On two ranks, of which the last batch has one row, metrics are those that stock reads in each micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from ranks import BASE, two_ranks
from side_by_side import assert_equal
from trainer_material import build, callback, figures
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

HOOKED = "hooks on one rank, three rows a step"
"""There micro-batches run one by one and give stock's outputs; on the other rank they are merged."""


def hook_one_rank(state: Any, model: Any) -> None:
    """Hook the model of the first rank when the second step begins; one of the hooks edits labels."""
    if state.global_step != 1 or not state.is_world_process_zero:
        return

    def edit(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            kwargs["labels"][kwargs["input_ids"] % 3 == 0] = -100

    model.register_forward_pre_hook(edit, with_kwargs=True)
    model.register_forward_hook(lambda *_: None)


# 25 packed rows for training and 3 for evaluation: the last batch of each has one row, which accelerate repeats on the
# second rank, where metrics leave it out.
FOUR = {"per_device_train_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": FOUR | {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": -1, "eval_steps": 3},
    "one row per rank": {"max_steps": 15, "logging_steps": 4, "eval_steps": 3},
    "experts": FOUR
    | {"family": "qwen3_moe", "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "experts, three rows merged": {"family": "qwen3_moe", "gradient_accumulation_steps": 3, "max_steps": 5},
    "adapters, checkpoints with reentry": FOUR
    | {
        "max_steps": 6, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "ddp_find_unused_parameters": False,  # else stock cannot run it either
        "trainer": {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")},
    },
    HOOKED: {
        "gradient_accumulation_steps": 3, "trainer": {"callbacks": [callback("on_step_begin", hook_one_rank)]}
    },
}  # fmt: skip


def make(cls: Any, **options: Any) -> Any:
    base = BASE | {"max_length": 56, "data": "prompt_completion", "per_device_eval_batch_size": 1}
    trainer = build(cls, Path(cls.__name__), **base | {"eval_strategy": "steps"} | options)
    assert trainer.accelerator.num_processes == 2
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (25, 3)
    return trainer


@pytest.mark.slow
@two_ranks
def test_two_ranks_with_uneven_last_batches_log_what_stock_logs() -> None:
    for name, options in CASES.items():
        ours, stock = (make(cls, **options) for cls in (FastSFTTrainer, SFTTrainer))
        for trainer in (ours, stock):
            trainer.train()
        report, first = ours.fastpack_report, ours.is_world_process_zero()
        assert report["sync_free"].path == "loss, metrics, host work"
        # `Trainer` copies a batch from "cpu" to "cpu:0": that is no edit.
        assert "edited" not in report["sync_free"].reason, report
        merged = "gradient_accumulation_steps" in options and not (name == HOOKED and first)
        assert (report["merge_accumulation"].status == "on") == merged, report
        if first:
            log = figures(stock)
            assert sum("entropy" in row for row in log) >= 3
            assert sum("eval_entropy" in row for row in log) >= 2
            assert_equal(figures(ours), log)


@pytest.mark.slow
@two_ranks
def test_one_rank_may_log_on_its_own() -> None:
    """As a callback may that only the first rank runs."""

    def log(state: Any, model: Any) -> None:
        if state.is_world_process_zero:
            trainer.log({"alone": 1.0})

    trainer = make(FastSFTTrainer, gradient_accumulation_steps=2, **FOUR)
    trainer.add_callback(callback("on_substep_end", log)())
    trainer.train()
    if trainer.is_world_process_zero():
        rows = figures(trainer)
        assert sum("alone" in row for row in rows) == 4
        assert sum("loss" in row and "entropy" in row for row in rows) == 4
