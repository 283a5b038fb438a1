"""Merged micro-batches: gradients, losses and log as one by one, in fewer kernels; split again when memory ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from out_of_memory import InBackward
from peft import LoraConfig
from torch import Tensor
from trainer_material import EndsEpoch, Halves, assert_line, assert_same_log, both, callback, train
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.features import merge_accumulation
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

MERGED = {"merge_accumulation": "on"}
ONE_BY_ONE = {"merge_accumulation": "off"}
# Rows of 48 tokens, four micro-batches of one row each per optimizer step.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
SMALL = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


def _with_gradients(folder: Path, fast: dict[str, Any], lora: bool, **more: Any) -> tuple[FastSFTTrainer, list[Any]]:
    """A trainer, and the gradients of each of its steps."""
    seen: list[dict[str, Tensor]] = []
    note = callback("on_pre_optimizer_step", lambda _, model: seen.append(gradients(model)))
    peft_config = LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.0, init_lora_weights=False)
    extra = {"callbacks": [note()]} | ({"peft_config": peft_config} if lora else {})
    torch.manual_seed(0)
    return train(FastSFTTrainer, folder, fast=fast, trainer=extra, **(SMALL | more)), seen


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3", False), ("mistral", True), ("gpt_oss", False), ("qwen3_moe", False), ("qwen3_moe", True)],
)
def test_gradients_of_a_step_are_those_of_its_micro_batches_one_by_one(
    tmp_path: Path, family: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    substeps: list[int] = []
    real = CallbackHandler.on_substep_end
    monkeypatch.setattr(CallbackHandler, "on_substep_end", lambda *args: substeps.append(1) or real(*args))
    options = {"family": family, "max_steps": 2, "max_grad_norm": 0.0, "optim": "sgd", "eval_strategy": "no"}
    merged, actual = _with_gradients(tmp_path / "merged", MERGED, lora, **options)
    alone, expected = _with_gradients(tmp_path / "alone", ONE_BY_ONE, lora, **options)
    assert merged.fastpack_report["merge_accumulation"].status == "on"
    assert alone.fastpack_report["merge_accumulation"].reason == "switched off"
    assert len(actual) == len(expected) == 2
    assert len(substeps) == 2 * (2 * 3)
    assert_gradients_close(actual[0], expected[0], rtol=1e-5, atol_of_all=1e-7)
    assert_gradients_close(actual[1], expected[1], rtol=1e-4, atol_of_all=1e-6)  # after an update


@pytest.mark.parametrize(
    ("family", "data", "padding"),
    [("qwen3", "prompt_completion", None), ("qwen3_moe", "text", None), ("qwen3", "text", 32)],
)
def test_log_is_that_of_stock_with_evaluations(tmp_path: Path, family: str, data: str, padding: int | None) -> None:
    """Padding is dropped, and counted as TRL counts it."""
    # 22 rows or so: the last optimizer step of an epoch has fewer micro-batches.
    options = SMALL | {"max_steps": 9, "eval_steps": 3, "include_num_input_tokens_seen": "all"}
    ours, stock = both(tmp_path, family=family, data=data, fast=MERGED, pad_to_multiple_of=padding, **options)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    assert ours.state.num_input_tokens_seen == stock.state.num_input_tokens_seen > 0
    assert ours.state.total_flos == stock.state.total_flos
    assert ours.state.epoch == stock.state.epoch


def _lengths_of_rows(folder: Path, fast: dict[str, Any], **options: Any) -> list[int]:
    """Tokens of each row that the model was called with while training."""
    lengths: list[int] = []
    model = tiny_model(options.pop("family", "qwen3"))

    stock = model.model.forward

    def note(*args: Any, **kwargs: Any) -> Any:  # no hook: with one, micro-batches are not merged
        if "packed_layer" in kwargs and torch.is_grad_enabled():
            lengths.append(kwargs["input_ids"].shape[1])
        return stock(*args, **kwargs)

    model.model.forward = note
    train(FastSFTTrainer, folder, fast=fast | {"verify_packing": "off"}, model=model, **options)
    return lengths


def test_auto_merges_up_to_the_target_and_on_merges_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SMALL | {"max_steps": 1, "eval_strategy": "no"}
    alone = _lengths_of_rows(tmp_path / "a", ONE_BY_ONE, **options)
    assert len(alone) == 4
    assert _lengths_of_rows(tmp_path / "b", MERGED, **options) == [sum(alone)]
    assert _lengths_of_rows(tmp_path / "c", {"sync_free": "auto"}, **options) == [sum(alone)]
    monkeypatch.setattr(merge_accumulation, "CPU_ROW_NUMBERS", 100 * 32)
    assert _lengths_of_rows(tmp_path / "d", {"sync_free": "auto"}, **options) == [sum(alone[:2]), sum(alone[2:])]


class _OwnStep(FastSFTTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("reason", "fast", "options"),
    [
        ("need sync_free", {"packed_attention": "off"}, {}),
        ("dense mask of sdpa", {"packed_attention": "sdpa"}, {}),
        ("NEFTune", {}, {"neftune_noise_alpha": 5.0}),
        ("longest document", {}, {"model": {"rope_parameters": DYNAMIC}}),
        ("two rows exceed", {"sync_free": "auto"}, {"max_length": 2100}),
        ("training_step of _OwnStep", {}, {"cls": _OwnStep}),
    ],
)
def test_off_with_the_reason(tmp_path: Path, reason: str, fast: dict[str, Any], options: dict[str, Any]) -> None:
    options = SMALL | {"max_steps": 1, "eval_strategy": "no"} | options
    if "model" in options:
        options["model"] = tiny_model("llama", **options["model"])
    trainer = train(options.pop("cls", FastSFTTrainer), tmp_path, fast=fast, **options)
    assert_line(trainer, "merge_accumulation", reason, status="off")
    assert trainer.fastpack_run.merging is None


def _clamp(model: Any) -> None:
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _scale(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _module, _args, out: out * 1.5)


def _from(event: str, since: int, hook: Callable[[Any], None]) -> Callable[[], TrainerCallback]:
    """A callback that hooks the model in an event of step `since`."""
    return callback(event, lambda state, model: hook(model) if state.global_step == since else None)


_WATCHERS: dict[str, tuple[Callable[[], TrainerCallback], str]] = {
    "callback": (Halves, "on_substep_end of Halves"),
    "hook": (_from("on_train_begin", 0, _clamp), "hook on the gradient of model.embed_tokens.weight"),
    "hook later": (_from("on_step_begin", 1, _clamp), "hook on the gradient of model.embed_tokens.weight"),
    "module hook later": (_from("on_step_begin", 1, _scale), "forward hook <lambda> on model.norm"),
}


@pytest.mark.parametrize(("make", "reason"), _WATCHERS.values(), ids=_WATCHERS)
def test_what_looks_at_each_micro_batch_sees_each_as_in_stock(
    tmp_path: Path, make: Callable[[], TrainerCallback], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = SMALL | {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "eval_strategy": "no"}
    setting = {} if make is Halves else MERGED  # known before the run, it would stop what is switched on by name
    with caplog.at_level(logging.WARNING):
        ours = train(
            FastSFTTrainer, tmp_path / "ours", fast=setting | {"verify_packing": "off"},
            trainer={"callbacks": [make()]}, **options,
        )  # fmt: skip
    stock = train(SFTTrainer, tmp_path / "stock", trainer={"callbacks": [make()]}, **options)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    assert_line(ours, "merge_accumulation", reason, status="off")
    said = [record for record in caplog.records if reason in record.getMessage()]
    # A callback is known when the run begins, and the banner says it.
    assert len(said) == (0 if make is Halves else 1)


def _full(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _refusing(limit: Callable[[int], bool], in_backward: bool) -> Any:
    """A model whose first layer runs out of memory where `limit` says so; `limit` is asked once per row."""
    model = tiny_model("qwen3")
    layer = model.model.layers[0]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        output = type(layer).forward(layer, *args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if not torch.is_grad_enabled() or not limit(hidden.shape[1]):
            return output
        if not in_backward:
            _full()
        hidden = InBackward.apply(hidden, _full)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layer.forward = refuse
    return model


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_splits_rows_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, in_backward: bool) -> None:
    options = SMALL | {"max_steps": 3, "gradient_checkpointing": False}
    with caplog.at_level(logging.WARNING):
        model = _refusing(lambda tokens: tokens > 100, in_backward)
        fast = MERGED | {"verify_packing": "off"}
        ours = train(FastSFTTrainer, tmp_path / "ours", fast=fast, model=model, **options)
    expected = train(FastSFTTrainer, tmp_path / "alone", fast=ONE_BY_ONE, **options)
    assert_same_log(ours, expected, rtol=2e-5, atol=1e-5)
    named = [record.getMessage() for record in caplog.records if "out of memory in a merged row" in record.getMessage()]
    assert len(named) == 1
    line = ours.fastpack_report["merge_accumulation"]
    assert line.path == "split again"
    assert line.reason in named[0]


def test_out_of_memory_in_later_groups_keeps_earlier_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_accumulation, "CPU_ROW_NUMBERS", 100 * 32)  # groups of two micro-batches
    rows: list[int] = []

    def limit(tokens: int) -> bool:
        rows.append(tokens)
        return len(rows) == 4  # the second group of the second step

    options = SMALL | {"max_steps": 3, "gradient_checkpointing": False, "eval_strategy": "no", "logging_steps": 1}
    fast = {"verify_packing": "off"}
    ours = train(FastSFTTrainer, tmp_path / "ours", fast=fast, model=_refusing(limit, in_backward=True), **options)
    alone = train(FastSFTTrainer, tmp_path / "alone", fast=ONE_BY_ONE, **options)
    assert len(rows) > 4
    assert_same_log(ours, alone, rtol=2e-5, atol=1e-5)


@pytest.mark.cuda
def test_layer_inputs_of_a_merged_row_are_offloaded_too(tmp_path: Path) -> None:
    options = {
        "max_steps": 2, "max_grad_norm": 0.0, "eval_strategy": "no", "gradient_checkpointing": True, "use_cpu": False,
        "learning_rate": 0.0,
    }  # fmt: skip
    merged, actual = _with_gradients(tmp_path / "a", MERGED | {"checkpoint_offload": "double_buffer"}, False, **options)
    _, expected = _with_gradients(tmp_path / "b", ONE_BY_ONE, False, **options)
    assert merged.fastpack_report["checkpoint_offload"].status == "on"
    assert merged.fastpack_report["merge_accumulation"].status == "on"
    # The first step runs one by one, to measure its memory.
    assert_gradients_close(actual[1], expected[1], rtol=1e-4, atol_of_all=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("setting", ["auto", "on"])
def test_on_cuda_rows_are_merged_from_the_second_step_on_as_memory_allows(tmp_path: Path, setting: str) -> None:
    options = SMALL | {"max_steps": 3, "eval_strategy": "no", "use_cpu": False, "bf16": True}
    fast = {"merge_accumulation": setting, "activation_memory": "off"}  # a plan runs rows of its own
    lengths = _lengths_of_rows(tmp_path / "ours", fast, **options)
    assert len(lengths) == 4 + 1 + 1
    ours = train(FastSFTTrainer, tmp_path / "a", fast={"merge_accumulation": setting}, **options)
    alone = train(FastSFTTrainer, tmp_path / "b", fast=ONE_BY_ONE, **options)
    assert_same_log(ours, alone, rtol=2e-2, atol=2e-2)


def test_an_epoch_that_ends_as_a_step_begins_keeps_the_micro_batch_that_ran(tmp_path: Path) -> None:
    options = SMALL | {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "no"}
    ours, stock = (
        train(cls, tmp_path, trainer={"callbacks": [EndsEpoch()]}, **options) for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert ours.fastpack_report["merge_accumulation"].status == "on"
    assert_same_log(ours, stock)
