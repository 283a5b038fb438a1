"""LoRA over bitsandbytes bases: what PEFT computes, the weight dequantised per use and never saved."""

from __future__ import annotations

import copy
from pathlib import Path

import peft.tuners.lora.layer
import pytest
import torch
from counted_operators import Counted
from lora_material import (
    any_ids,
    assert_no_further,
    assert_trains_as_peft,
    functions_for_every_size,  # noqa: F401
    joint_error,
    reference_projection,
    saved_bytes,
    step,
)
from peft import PeftModel
from quantised_material import quantised, quantised_linear
from trainer_material import train

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.lora.base_weight import from_4bit
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.testing import gradients, tiny_model

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.usefixtures("functions_for_every_size")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_4_bit_projection_equals_the_reference(kind: str, nested: bool) -> None:
    torch.manual_seed(0)
    layer = quantised_linear(torch.nn.Linear(128, 64, bias=False), kind, nested=nested)
    base = from_4bit(layer.weight)
    torch.testing.assert_close(
        base.dense(torch.float32), bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    )
    results = []
    x, a, b = torch.randn(6, 128), torch.randn(4, 128), torch.randn(64, 4)
    for function in (lora_projection, reference_projection):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        out = function(leaves[0], base, *leaves[1:])
        out.sin().sum().backward()
        results.append([out.detach(), *[leaf.grad for leaf in leaves]])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False)]
)
def test_training_equals_peft_over_20_steps(kind: str, nested: bool) -> None:
    stock = quantised(kind, nested=nested)
    models = [stock, copy.deepcopy(stock)]
    report = apply_lora(models[1])
    assert len(report.fast) == 14
    assert_trains_as_peft(*models)


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)  # fmt: skip
def test_bf16_error_of_nf4_is_no_larger_than_that_of_peft(dtype: torch.dtype, compute: torch.dtype) -> None:
    """Against the dequantised weights in float64, adapters in bf16 as TRL trains them.

    A model in fp16 with ``bnb_4bit_compute_dtype=torch.float16`` is that of TRL's QLoRA notebook.
    """
    errors = []
    for seed in range(8):
        stock = quantised("nf4", nested=True, dtype=dtype, compute=compute, seed=seed)
        for name, parameter in stock.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        fast, exact = copy.deepcopy(stock), copy.deepcopy(stock)
        for module in exact.modules():
            if hasattr(module, "lora_A"):
                weight = from_4bit(module.base_layer.weight).dense(torch.float32)
                dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                dense.weight.data, dense.weight.requires_grad = weight, False
                module.base_layer = dense
                module.__class__ = peft.tuners.lora.layer.Linear
        exact = exact.double()
        report = apply_lora(fast, compute_dtype=torch.bfloat16)
        step(exact, any_ids(64, seed))
        for model in (stock, fast):
            step(model, any_ids(64, seed), autocast=True)
        reference = gradients(exact)
        assert not report.call_by_call
        errors.append([joint_error(gradients(model), reference) for model in (stock, fast)])
    assert_no_further(errors)


def test_a_4_bit_weight_is_dequantised_once_per_use_and_never_saved() -> None:
    counts, kept = {}, {}
    for name in ("stock", "fast", "cached"):
        model = quantised("nf4", dtype=torch.bfloat16)
        if name != "stock":
            report = apply_lora(model, cache_dequantized="on" if name == "cached" else "off")
        kept[name] = saved_bytes(model, any_ids(48))
        with Counted(lambda name, _args: name == "dequantize_4bit") as counted:
            step(model, any_ids(48), autocast=True)
        counts[name] = counted.count
    # 14 uses forward; backward leaves out the three that read the embedded tokens, which need no gradient.
    assert counts["fast"] == 14 + 11
    assert counts["cached"] == 0
    assert kept["fast"] == kept["cached"] < kept["stock"]
    assert report.copies.nbytes == pytest.approx(2 * 2 * (4 * 64 * 64 * 0.75 + 3 * 64 * 128), rel=0.3)


def test_cached_weights_give_the_same_bits() -> None:
    model = quantised("nf4", nested=True, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    apply_lora(model, cache_dequantized="off")
    apply_lora(twin, cache_dequantized="on")
    assert torch.equal(*(step(each, any_ids(), autocast=True) for each in (model, twin)))
    for name, grad in gradients(model).items():
        assert torch.equal(grad, gradients(twin)[name]), name


def test_merged_and_unmerged_4_bit_weights_are_read_anew() -> None:
    model = quantised("nf4")
    twin = copy.deepcopy(model)
    apply_lora(model, cache_dequantized="on")
    for each in (model, twin):
        each.merge_adapter()
        each.unmerge_adapter()
    losses = [float(step(each, any_ids())) for each in (model, twin)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert joint_error(gradients(model), gradients(twin)) <= 5e-6


@pytest.mark.parametrize("compute", [torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_a_base_with_a_compute_dtype_of_its_own_rounds_and_overflows_as_in_peft(
    compute: torch.dtype, given: torch.dtype, autocast: torch.dtype
) -> None:
    """Values that fp16 does not have become 0 or infinite in bitsandbytes' input and in the gradient it returns."""
    stock = quantised("nf4", nested=True, compute=compute).base_model.model.model.layers[0].mlp.up_proj
    fast = copy.deepcopy(stock)
    apply_lora(fast, compute_dtype=autocast)
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    x[1], x[2] = x[1] * 1e-9, x[2] * 1e6
    grad = torch.randn(40, 128) * torch.logspace(-12, 0, 40)[:, None]
    results = []
    for layer in (stock, fast):
        leaf = x.to(given).requires_grad_()
        with torch.autocast("cpu", dtype=autocast):
            out = layer(leaf)
        out.backward(grad.to(out.dtype))
        results.append([out, leaf.grad, *gradients(layer).values()])
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert isinstance(fast, FastLora)
    out, mine = (result[0][[0, *range(3, 40)]] for result in results)
    torch.testing.assert_close(mine, out, rtol=0.02, atol=0.02)
    # Rows of the gradient are 12 orders of magnitude apart: the small ones vanish in both or in none.
    theirs, ours = (result[1][3:].float().norm(dim=1) for result in results)
    assert torch.equal(ours == 0, theirs == 0)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=1e-7 if torch.float16 in (compute, autocast, given) else 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_qlora_through_the_trainer(tmp_path: Path, checkpointing: bool) -> None:
    losses, reports = {}, {}
    for name in ("on", "off"):
        model = quantised("nf4", nested=True)
        trainer = train(
            FastSFTTrainer, tmp_path / name, model=model, packing=True, eval_strategy="no",
            gradient_checkpointing=checkpointing, fast={"lora": name},
        )  # fmt: skip
        losses[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        reports[name] = trainer.fastpack_report["lora"]
        assert not any(isinstance(module, FastLora) for module in model.modules())  # restored
        trainer.save_model(tmp_path / name / "adapter")
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)
    assert reports["on"].status == "on"
    assert "14 of 14 LoRA layers" in reports["on"].reason
    assert reports["off"].reason == "switched off"
    loaded = PeftModel.from_pretrained(
        tiny_model("llama", hidden_size=64, intermediate_size=128), tmp_path / "on/adapter"
    )
    assert any("lora_A" in name for name, _ in loaded.named_parameters())
