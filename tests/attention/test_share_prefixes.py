"""`share_prefixes` in whole runs beside stock: same log, same change of the weights, fewer tokens; or named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_material import prefixed
from torch import Tensor
from trainer_material import assert_same_log, both, build, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import share_prefixes as feature
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.packing.batching import packing_collator
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.step.accumulation import merge_inputs
from fastpack_trl.testing import tiny_model

SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 10, "max_grad_norm": 0.0}
PACKED = {"packing": True, "max_length": 120, "per_device_train_batch_size": 1, "eval_strategy": "no"}


def changes(trainer: Any, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() - before[name] for name, p in trainer.model.named_parameters() if p.requires_grad}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two sets of weights, relative to the second."""
    first, second = (torch.cat([each[name].double().flatten() for name in other]) for each in (one, other))
    return float((first - second).norm() / second.norm())


def line(trainer: Any) -> Any:
    return trainer.fastpack_report["share_prefixes"]


def hooked() -> Any:
    """A model of which a hook looks at the positions."""
    model = tiny_model("qwen3")
    model.get_decoder().register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    return model


def assert_shared(trainer: Any) -> None:
    found = line(trainer)
    assert found.status == "on", found
    assert "of the documents' tokens" in found.reason


def assert_same_training(folder: Path, *, family: str = "qwen3", shared: bool = True, **options: Any) -> Any:
    """Ours and stock's log and the change of the weights, relative to its largest."""
    model = options.pop("model", None) or tiny_model(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours, stock = both(folder, **{"model": model, "data": prefixed(), "fast": {}, **SGD, **PACKED, **options})
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-5)
    losses = [row["loss"] for row in stock.state.log_history if "loss" in row]
    assert abs(losses[-1] - losses[0]) > 0.01 * losses[0], "the rate moves the loss"
    mine, theirs = changes(ours, before), changes(stock, before)
    assert mine.keys() == theirs.keys()
    assert distance(mine, theirs) <= 1e-5, "of all weights together"
    for name, change in theirs.items():
        assert (mine[name] - change).norm() <= 1e-4 * change.norm() + 1e-7, name
    if shared:
        assert_shared(ours)
    return ours


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_families_train_as_stock(family: str, tmp_path: Path) -> None:
    assert_same_training(tmp_path, family=family)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_the_weights_are_as_near_to_float64_as_those_of_stock(family: str, tmp_path: Path) -> None:
    """What is left between both is rounding: single small weights of stock itself are 1e-4 away."""
    model, found = tiny_model(family), {}
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    for dtype in (torch.float32, torch.float64):
        ours, stock = both(tmp_path, model=copy.deepcopy(model).to(dtype), data=prefixed(), fast={}, **SGD, **PACKED)
        assert_shared(ours)
        found["ours", dtype], found["stock", dtype] = changes(ours, before), changes(stock, before)
    exact = found["stock", torch.float64]
    assert distance(found["ours", torch.float64], exact) <= 1e-5, "the head computes in fp32 on both sides"
    assert distance(found["ours", torch.float32], exact) <= 1.5 * distance(found["stock", torch.float32], exact) + 1e-6


@pytest.mark.parametrize("family", ["gpt_oss", "opt"])
def test_sinks_and_learned_positions_train_as_without_sharing(family: str, tmp_path: Path) -> None:
    """Stock's own rows of these leak from document to document on the CPU."""
    model = tiny_model(family)
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    runs = [
        train(FastSFTTrainer, tmp_path, model=copy.deepcopy(model), data=prefixed(), fast=fast, **SGD, **PACKED)
        for fast in ({}, {"share_prefixes": "off"})
    ]
    assert_shared(runs[0])
    assert_same_log(*runs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"data": prefixed(labels=True)},
        {"loss_type": "dft"},
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 3, "fast": {"merge_accumulation": "on"}},
        {"packing": False, "padding_free": True, "max_length": None, "per_device_train_batch_size": 6},
        {"packing": False, "per_device_train_batch_size": 6},
        {"packing_strategy": "bfd_split", "max_length": 45, "per_device_train_batch_size": 4},
        {"pad_to_multiple_of": 32},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"gradient_checkpointing": True},
        {"dataloader_num_workers": 1, "max_steps": 4},
        {"packed_attention": "sdpa"},
    ],
    ids=lambda options: "-".join(options),
)
def test_kinds_of_runs_train_as_stock(options: dict[str, Any], tmp_path: Path) -> None:
    path = options.pop("packed_attention", None)
    options = options | ({"fast": {"packed_attention": path}} if path else {})
    assert_same_training(tmp_path, **options)


def test_experts_balance_as_in_stock(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.config.output_router_logits = True
    assert_same_training(
        tmp_path, model=model, router_aux_loss_coef=0.1, gradient_accumulation_steps=2,
        fast={"merge_accumulation": "on"},
    )  # fmt: skip


def test_lora_without_dropout_shares_and_with_it_says_what_0_would_save(tmp_path: Path) -> None:
    for dropout in (0.0, 0.05):
        config = LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear")
        ours = train(
            FastSFTTrainer, tmp_path, data=prefixed(), fast={}, trainer={"peft_config": config}, **PACKED, max_steps=1
        )
        found = line(ours)
        assert found.status == ("off" if dropout else "on")
        if dropout:
            assert "dropout 0.05" in found.reason
            assert "without that tokens computed" in found.reason


@pytest.mark.parametrize("merged", [False, True], ids=["", "merged"])
def test_labels_edited_after_collation_count_as_edited(merged: bool, tmp_path: Path) -> None:
    runner = build(FastSFTTrainer, tmp_path, data=prefixed(), fast={}, **SGD, **PACKED)
    sums = []
    for shares in (True, False):
        collator = packing_collator(runner, share_prefixes=shares)
        rows = [collator([row]) for row in runner.train_dataset.with_format("numpy")][:3]
        assert not shares or all(row["packed_batch"].documents for row in rows)
        inputs = merge_inputs(rows) if merged else rows[0]
        inputs["labels"][:, ::3] = IGNORE_INDEX
        batch = inputs["packed_batch"]
        with packed_attention(runner.model):
            out = runner.model(**inputs, loss_batch=batch, loss_type="nll")
        assert out.positions is not None
        out.total.backward()
        sums.append([out.total.detach(), *(p.grad for p in runner.model.parameters())])
        runner.model.zero_grad()
    for ours, whole in zip(*sums, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def test_little_in_common_stays_as_it_is(tmp_path: Path) -> None:
    ours = train(FastSFTTrainer, tmp_path, data="ids", fast={}, packing=True, max_steps=1)
    found = line(ours)
    assert (found.status, found.path) == ("off", "each document whole")
    assert "100% of the documents' tokens" in found.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fast": {"share_prefixes": "off"}}, "switched off"),
        ({"fast": {"sync_free": "off"}}, "needs sync_free"),
        ({"family": "bloom"}, "each document of a packed row is padded"),
        ({"neftune_noise_alpha": 5.0}, "NEFTune"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"data": prefixed().to_iterable_dataset()}, "a stream has no sample"),
        ({"trainer": {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()}}, "compute_loss_func"),
        ({"model": hooked()}, "may expect whole documents"),
        ({"family": "granitemoehybrid"}, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_share_is_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    ours = train(FastSFTTrainer, tmp_path, **{"data": prefixed(), "fast": {}, **PACKED, "max_steps": 1, **options})
    found = line(ours)
    assert found.status == "off"
    assert reason in found.reason


def test_a_stream_shares_where_it_is_asked_to(tmp_path: Path) -> None:
    ours = assert_same_training(
        tmp_path, data=prefixed().to_iterable_dataset(), fast={"share_prefixes": "on"}, shared=False
    )  # fmt: skip
    assert (line(ours).status, "not known of a stream" in line(ours).reason) == ("on", True)


def test_a_run_that_is_resumed_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    options = {"data": prefixed(), "fast": {}, **SGD, **PACKED}
    whole = train(FastSFTTrainer, tmp_path / "whole", save_strategy="steps", save_steps=4, **options)
    assert_shared(whole)
    again = build(FastSFTTrainer, tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(next((tmp_path / "whole").rglob("checkpoint-4"))))
    assert_shared(again)
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(dict(again.model.named_parameters())[name], weight, msg=name)


def test_the_banner_says_what_no_dropout_would_save(tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear")
    options: dict[str, Any] = {**PACKED, "max_steps": 1}
    dropped = train(FastSFTTrainer, tmp_path, data=prefixed(), fast={}, trainer={"peft_config": config}, **options)
    assert "off: dropout 0.05" in dropped.fastpack_report.facts[feature.FACT]
    little = train(FastSFTTrainer, tmp_path, data="ids", fast={}, **options)
    assert feature.FACT not in little.fastpack_report.facts


def test_on_by_name_stops_where_it_cannot_be_had(tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    ours = build(
        FastSFTTrainer, tmp_path, data=prefixed(), fast={"share_prefixes": "on"}, trainer={"peft_config": config},
        **PACKED,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"share_prefixes='on': dropout 0\.1.*set share_prefixes='auto'"):
        ours.train()


def test_rows_have_fewer_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    stock = PackingCollator.torch_call

    def recorded(self: PackingCollator, examples: Any) -> Any:
        inputs = stock(self, examples)
        if self.share_prefixes:
            batch = inputs["packed_batch"]
            seen.append((inputs["input_ids"].shape[1], sum(batch.documents.lengths)))
        return inputs

    monkeypatch.setattr(PackingCollator, "torch_call", recorded)
    train(FastSFTTrainer, tmp_path, data=prefixed(), fast={}, **PACKED, max_steps=3)
    assert len(seen) >= 3
    assert all(row < 0.8 * whole for row, whole in seen)
