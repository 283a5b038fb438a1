"""LoRA over quantized and other frozen bases: what PEFT computes, dense copies kept if they fit, and never saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_operators import Counted
from lora_material import (
    adapted,
    any_ids,
    assert_trains_as_peft,
    fast_layers,
    joint_error,
    left_in_fp32,
    quantized,
    saved_bytes,
    step,
)
from trainer_material import train

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.lora import report as lora_report
from fastpack_trl.testing import gradients

# 14 projections of a llama with two layers, widths 64 and 128, two of four heads for keys and values.
COPIES = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_training_equals_peft_over_20_steps(kind: str, nested: bool) -> None:
    stock = quantized(kind, nested=nested)
    models = [stock, copy.deepcopy(stock)]
    assert len(apply_lora(models[1]).fast) == 14
    assert_trains_as_peft(*models)


def test_a_base_with_another_16_bit_compute_dtype_than_the_run_is_pefts() -> None:
    """TRL's QLoRA notebook sets ``bnb_4bit_compute_dtype=torch.float16`` and trains in bf16."""
    stock = quantized("nf4", compute=torch.float16)
    for compute_dtype, named in ((torch.bfloat16, "handed_over"), (None, "call_by_call")):
        fast = copy.deepcopy(stock)
        report = apply_lora(fast, compute_dtype=compute_dtype)
        assert torch.equal(*(step(model, any_ids(), autocast=True) for model in (stock, fast)))
        said = "bnb_4bit_compute_dtype=torch.float16 in a run in torch.bfloat16" if compute_dtype else "base Linear4bit"
        assert all(said in reason for reason in getattr(report, named))
        assert sum(map(len, report.handed_over.values())) + sum(report.call_by_call.values()) == 14


def test_a_4_bit_weight_is_dequantized_once_per_use_and_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, kept = {}, {}
    for name in ("stock", "fast", "cached"):
        model = quantized("nf4", dtype=torch.bfloat16)
        if name != "stock":
            budget = 2**40 if name == "cached" else None
            monkeypatch.setattr(lora_report, "copy_budget", lambda device, budget=budget: budget)
            apply_lora(model)
        kept[name] = saved_bytes(model, any_ids(48))
        with Counted(lambda name, _args: name == "dequantize_4bit") as counted:
            step(model, any_ids(48), autocast=True)
        counts[name] = counted.count
    # 14 uses forward; backward leaves out the three that read the embedded tokens, which need no gradient.
    assert counts["fast"] == 14 + 11
    assert counts["cached"] == 0
    assert kept["fast"] == kept["cached"] < kept["stock"]


def kept(model: Any) -> set[bool]:
    return {layer.fastpack_dense is not None for layer in fast_layers(model)}


def test_copies_take_an_eighth_of_the_free_memory_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_report, "allocatable", lambda device: 8000)
    assert lora_report.copy_budget(torch.device("cuda")) == 1000
    assert lora_report.copy_budget(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("budget", "there", "said"),
    [(COPIES, True, "0.28 MiB of frozen weights kept in the compute dtype"),
     (COPIES - 1, False, "frozen weights are converted per use: copies need 0.28 MiB, an eighth of the free memory is"),
     (None, False, "")],
)  # fmt: skip
def test_all_copies_or_none_are_kept_and_named_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int | None, there: bool, said: str
) -> None:
    monkeypatch.setattr(lora_report, "copy_budget", lambda device: budget)
    model = left_in_fp32(quantized("nf4", nested=True))
    applied = apply_lora(model)
    assert kept(model) == {there}
    assert said in str(applied)
    applied.revert()
    options = {"packing": True, "eval_strategy": "no", "max_steps": 1}
    trainer = train(FastSFTTrainer, tmp_path, model=model, **options)
    assert said in trainer.fastpack_report["lora"].reason
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("fastpack")]


@pytest.mark.usefixtures("copies_fit")
def test_frozen_fp32_weights_are_cast_once_for_a_run_in_bf16_and_never_for_one_in_fp32() -> None:
    model, stock = adapted("llama"), adapted("llama")
    applied = apply_lora(model)
    assert "frozen weights" not in str(applied)
    assert kept(model) == {False}
    applied.revert()
    applied = apply_lora(model, compute_dtype=torch.bfloat16)
    casts = []
    for each in (model, stock):
        with Counted(lambda name, args: name == "_to_copy" and sorted(args[0].shape) == [32, 48]) as counted:
            for _ in range(2):
                step(each, any_ids(), autocast=True)
        casts.append(counted.count)
    assert casts[0] == 0
    assert casts[1] >= 4
    assert joint_error(gradients(model), gradients(stock)) < 0.03
    with torch.no_grad():  # a changed weight makes the copy stale
        for each in (model, stock):
            each.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.zero_()
    losses = [float(step(each, any_ids(), autocast=True)) for each in (model, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    applied.revert()
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("fastpack")]


def test_kept_4_bit_weights_give_the_same_bits_until_they_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("nf4", nested=True, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    apply_lora(twin)
    monkeypatch.setattr(lora_report, "copy_budget", lambda device: COPIES)
    apply_lora(model)
    assert kept(model) == {True}
    for _ in range(2):
        assert torch.equal(*(step(each, any_ids(), autocast=True) for each in (model, twin)))
        for name, grad in gradients(model).items():
            assert torch.equal(grad, gradients(twin)[name]), name
        for each in (model, twin):
            each.merge_adapter()
            each.unmerge_adapter()
    assert kept(model) == {False}
