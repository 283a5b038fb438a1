"""Rows that are not packed, as most first runs have them: small batches, accumulation, any kind of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trainer_material import assert_same_log, both, make_dataset, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
WHOLE = {"max_steps": -1, "num_train_epochs": 1}


def tokens(*rows: list[int], masked: tuple[int, ...] = ()) -> Dataset:
    """Rows as they are; those of `masked` have no label that counts."""
    labels = [[-100] * len(row) if index in masked else row for index, row in enumerate(rows)]
    return Dataset.from_dict({"input_ids": list(rows), "labels": labels})


def rows(count: int, longest: int = 14) -> list[list[int]]:
    return [[5 + (7 * index + place) % 80 for place in range(2 + index % longest)] for index in range(count)]


AS_THEY_ARE = {"dataset_kwargs": {"skip_prepare_dataset": True}}


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 1},
        ONE_BY_ONE,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        ONE_BY_ONE | {"data": "prompt_completion", "completion_only_loss": True},
        ONE_BY_ONE | {"data": "prompt_completion", "completion_only_loss": False},
        ONE_BY_ONE | {"data": "conversational", "assistant_only_loss": True},
        ONE_BY_ONE | {"data": "conversational", "gradient_checkpointing": False},
        ONE_BY_ONE | {"lora": True},
        ONE_BY_ONE | WHOLE | {"data": make_dataset("text", 22), "eval_steps": 3},  # the last group has two of four
        ONE_BY_ONE | {"max_length": None},
        ONE_BY_ONE | {"max_length": 5},
        ONE_BY_ONE | {"per_device_train_batch_size": 3, "dataloader_drop_last": True, **WHOLE},
        ONE_BY_ONE | {"train_sampling_strategy": "group_by_length"},
        ONE_BY_ONE | {"family": "gpt_oss"},
        ONE_BY_ONE | {"family": "qwen3_moe"},
        ONE_BY_ONE | AS_THEY_ARE | {"data": tokens(*rows(24), masked=(0, 1, 2, 3, 9))},
        {"per_device_train_batch_size": 2, "eval_strategy": "no", "max_steps": 5, "logging_nan_inf_filter": False}
        | AS_THEY_ARE | {"data": tokens(*([5 + index] for index in range(12)), *rows(4))},
    ],
    ids=lambda options: "-".join(f"{name}={value if not isinstance(value, Dataset) else len(value)}"
                                 for name, value in options.items()),
)  # fmt: skip
def test_log_of_unpacked_rows_is_that_of_stock(tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    if options.pop("lora", False):
        options["trainer"] = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
    ours, stock = both(tmp_path, **options)
    assert_same_log(ours, stock, rtol=3e-5, atol=5e-6)
    report = ours.fastpack_report
    assert report["batches"].path == "padding-free"
    assert report["sync_free"].path == "loss, metrics, host work"
    merged = options.get("gradient_accumulation_steps", 1) > 1
    assert report["merge_accumulation"].status == ("on" if merged else "off")


@pytest.mark.parametrize("options", [ONE_BY_ONE, {"per_device_train_batch_size": 2}, ONE_BY_ONE | {"packing": True}],
                         ids=["accumulated", "two documents", "packed"])  # fmt: skip
def test_an_adapter_that_is_invoked_once_per_row_has_the_rows_of_stock(tmp_path: Path, options: dict[str, Any]) -> None:
    config = LoraConfig(
        r=4, init_lora_weights=False, alora_invocation_tokens=[10], target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    # PEFT refuses an evaluation between two steps under checkpointing.
    ours, stock = both(tmp_path, **options, eval_strategy="no", trainer={"peft_config": config})
    assert_same_log(ours, stock)
    packs = "packing" in options
    assert "aLoRA" in ours.fastpack_report["merge_accumulation" if packs else "batches"].reason


def test_what_a_merged_row_draws_otherwise_is_named(tmp_path: Path) -> None:
    def line(model: Any) -> Any:
        trainer = train(FastSFTTrainer, tmp_path, model=model, **ONE_BY_ONE, max_steps=1, eval_strategy="no")
        return trainer.fastpack_report["merge_accumulation"]

    dropped = tiny_model("qwen3")
    dropped.config.layerdrop = 0.5
    assert "layerdrop" in line(dropped).reason
    jittered = tiny_model("mixtral")
    jittered.config.router_jitter_noise = 0.1
    found = line(jittered)
    assert (found.status, "jitter" in found.reason) == ("on", True), found
