"""A step asks the device nothing between two logs, and logs what stock logs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from step_material import ONE_LOG, BetweenLogs
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

LORA = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")}
FULL: dict[str, Any] = {}


def counted(cls: type[SFTTrainer], folder: Path, model: Any, method: dict[str, Any], **more: Any) -> BetweenLogs:
    counter = BetweenLogs()
    train(cls, folder, model=model, trainer={"callbacks": [counter], **method}, **ONE_LOG | more)
    return counter


@pytest.mark.parametrize(
    ("family", "layers", "method", "accumulation"),
    [
        ("qwen3", 2, FULL, 4), ("qwen3", 8, FULL, 1), ("qwen3", 2, LORA, 1), ("qwen3", 8, LORA, 4),
        ("qwen3_moe", 2, FULL, 1), ("qwen3_moe", 8, FULL, 4), ("qwen3_moe", 2, LORA, 4), ("qwen3_moe", 8, LORA, 1),
    ],
)  # fmt: skip
def test_no_host_sync_between_two_logs(
    family: str, layers: int, method: dict[str, Any], accumulation: int, tmp_path: Path
) -> None:
    model = tiny_model(family, num_hidden_layers=layers)
    if family == "qwen3_moe":
        # What the eager experts ask the device is theirs, and not of the step.
        model.set_experts_implementation("batched_mm")
    same = copy.deepcopy(model)
    seen = counted(FastSFTTrainer, tmp_path, model, method, gradient_accumulation_steps=accumulation)
    assert seen.per_micro_batch == 0, seen.syncs
    if layers == 2:
        stock = counted(SFTTrainer, tmp_path, same, method, gradient_accumulation_steps=accumulation)
        assert stock.per_micro_batch >= 5, stock.syncs


@pytest.mark.parametrize("options", [
    {"family": "qwen3"},
    {"family": "qwen3", "loss_type": "dft"},
    {"family": "qwen3_moe"},
    {"family": "mixtral", "router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2},
    {"family": "gemma2", "model": {"final_logit_softcapping": 2.0}},
    {"family": "granite", "model": {"logits_scaling": 4.0}},
    {"family": "cohere2", "model": {"logit_scale": 0.5}},
    {"family": "gpt_oss", "fast": {"packed_attention": "off"}},
    {"family": "qwen3", "fast": {"packed_attention": "padded_rows"}},
    {"family": "qwen3", "gradient_checkpointing": True},
    {"family": "qwen3", "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    {"family": "qwen3", "logging_steps": 3, "eval_steps": 2, "max_steps": 5},
    {"family": "qwen3", "trainer": LORA},
    {"family": "qwen3", "pad_to_multiple_of": 16},
    {"family": "qwen3", "neftune_noise_alpha": 5.0},
], ids=str)  # fmt: skip
def test_log_equals_that_of_stock(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    fields = options.pop("model", {})
    base = tiny_model(options["family"], **fields)
    runs = []
    for cls, name in ((FastSFTTrainer, "ours"), (SFTTrainer, "stock")):
        more = {"gradient_checkpointing": False, "data": "prompt_completion", "packing": True} | options
        if cls is SFTTrainer:
            more.pop("fast", None)
        torch.manual_seed(0)
        runs.append(train(cls, tmp_path / name, **more | {"model": copy.deepcopy(base)}))
    assert_same_log(runs[0], runs[1])
    line = runs[0].fastpack_report["sync_free"]
    assert line.path == ("host work only" if options.get("fast", {}).get("packed_attention") == "off" else LOSS), line


LOSS = "loss, metrics, host work"
