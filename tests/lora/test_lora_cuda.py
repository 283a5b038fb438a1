"""LoRA on a CUDA device: bf16 accuracy, 4-bit and FP8 bases, no host wait, fewer launches."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lora_material
import pytest
import torch
from counted_operators import kernels_of
from lora_material import (
    adapted,
    any_ids,
    assert_never_waits,
    assert_no_further,
    fast_layers,
    joint_error,
    quantized_linear,
    weights,
)
from peft import LoraConfig, get_peft_model
from trainer_material import assert_line, figures, make_dataset, make_tokenizer, settings

from benchmarks.models import quantize
from fastpack_trl import FastSFTConfig, FastSFTTrainer, apply_lora
from fastpack_trl.kernels.fp8 import quantize_rows, scaled_product
from fastpack_trl.lora import report as lora_report
from fastpack_trl.lora.base_weight import Fp8Weight, put_in_fp8
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.testing import gradients, tiny_model

pytestmark = pytest.mark.cuda
IN_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device that multiplies in FP8",
)
SHAPE = {"hidden_size": 256, "intermediate_size": 512}


step = partial(lora_material.step, autocast=True)


def qlora(seed: int = 0) -> Any:
    base = tiny_model("llama", seed=seed, **SHAPE).to(torch.bfloat16).cuda()
    quantize(base, "cuda")
    model = adapted(base, seed=seed, target_modules="all-linear").cuda()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_bf16_gradients_are_no_further_from_float64_than_those_of_peft(family: str) -> None:
    errors = []
    for seed in range(8):
        stock = adapted(family, seed=seed, dtype=torch.bfloat16).cuda()
        fast, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
        assert apply_lora(fast, compute_dtype=torch.bfloat16).fast
        ids = any_ids(64, seed).cuda()
        step(exact, ids, autocast=False)
        for model in (stock, fast):
            step(model, ids)
        errors.append([joint_error(gradients(model), gradients(exact)) for model in (stock, fast)])
    assert_no_further(errors)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nf4_gradients_equal_those_of_peft(keeps: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    stock = qlora()
    fast = copy.deepcopy(stock)
    if not keeps:
        monkeypatch.setattr(lora_report, "copy_budget", lambda device: 0)
    report = apply_lora(fast, compute_dtype=torch.bfloat16)
    assert len(report.fast) == 14
    assert ("kept in the compute dtype" in report.copies) == keeps
    for model in (stock, fast):
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        step(model, any_ids(64).cuda())
    assert joint_error(gradients(fast), gradients(stock)) < 0.03


@pytest.mark.parametrize("kind", ["dense", "nf4", pytest.param("fp8", marks=IN_FP8)])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_never_waits(kind: str, compiled: bool) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    model = qlora() if kind == "nf4" else adapted("llama", dtype=torch.bfloat16, **SHAPE).cuda()
    apply_lora(model, compute_dtype=torch.bfloat16)
    for layer in fast_layers(model) if kind == "fp8" else []:
        put_in_fp8(layer, torch.bfloat16)
    assert_never_waits(model, compiled=compiled)


def test_a_step_launches_fewer_kernels_than_with_peft() -> None:
    counts = {}
    for name in ("stock", "fast"):
        model = adapted("llama", dtype=torch.bfloat16, **SHAPE).cuda()
        if name == "fast":
            apply_lora(model, compute_dtype=torch.bfloat16)
        step(model, any_ids(64).cuda())
        counts[name] = kernels_of(lambda model=model: step(model, any_ids(64).cuda()))
    assert counts["stock"] >= 1.2 * counts["fast"], counts


def test_a_layer_launches_fewer_kernels_with_its_projections_together() -> None:
    """Forward and backward of one Qwen3 layer: two thin matmuls, nine products and sums of gradients less."""
    kernels = {}
    for joint in (False, True):
        counts = []
        for layers in (1, 2):
            model = adapted("qwen3", dtype=torch.bfloat16, num_hidden_layers=layers, **SHAPE).cuda()
            for siblings in apply_lora(model, compute_dtype=torch.bfloat16).siblings:
                siblings._split = 0 if joint else 1
            step(model, any_ids(256).cuda())
            counts.append(kernels_of(lambda model=model: step(model, any_ids(256).cuda())))
        kernels[joint] = counts[1] - counts[0]
    assert kernels[True] <= kernels[False] - 12, kernels


@IN_FP8
@pytest.mark.parametrize("rows", [1, 7, 512])
def test_the_product_of_the_device_is_that_of_the_reference(rows: int) -> None:
    x, weight = (torch.randn(count, 4096, device="cuda").bfloat16() for count in (rows, 256))
    a, b = quantize_rows(x), quantize_rows(weight)
    found, true = scaled_product(a, b, torch.bfloat16), a.dense().double() @ b.dense().double().t()
    # Rounding to bf16 alone: 2**-9 at most; sums in fewer bits than fp32 may add as much again.
    assert (found.double() - true).norm() / true.norm() < 2**-8


@IN_FP8
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_a_projection_is_that_of_the_cpu(tokens: int, compiled: bool) -> None:
    torch.manual_seed(0)
    values = {"x": (tokens, 512), "a": (16, 512), "b": (1024, 16), "weight": (1024, 512), "grad": (tokens, 1024)}
    given = {name: torch.randn(shape).bfloat16() for name, shape in values.items()}
    results = []
    for device in ("cpu", "cuda"):
        own = {name: tensor.to(device) for name, tensor in given.items()}
        base = Fp8Weight.of(own["weight"])
        read = [own[name].clone().requires_grad_() for name in ("x", "a", "b")]
        torch._dynamo.reset()
        project = torch.compile(lora_projection) if compiled and device == "cuda" else lora_projection
        out = project(read[0], base, *read[1:])
        out.backward(own["grad"])
        results.append([out.detach().cpu(), *[leaf.grad.cpu() for leaf in read if leaf.grad is not None]])
    for theirs, ours in zip(*results, strict=True):
        # Values on the edge of two FP8 numbers may be rounded to either, by a compiler that divides with less care.
        assert (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()


@IN_FP8
@pytest.mark.parametrize("fields", [{}, {"cuda_graph": "on"}], ids=str)
def test_a_run_learns_as_one_over_the_loaded_base_and_leaves_it(tmp_path: Path, fields: dict[str, str]) -> None:
    losses = {}
    for base in ("as_loaded", "fp8"):
        model = adapted("qwen3", dtype=torch.bfloat16, **SHAPE)
        before = weights(model)
        args = settings(tmp_path / base, packing=True, use_cpu=False, bf16=True, max_steps=12)
        trainer = FastSFTTrainer(
            model,
            args=FastSFTConfig(**args, frozen_base=base, **fields),
            train_dataset=make_dataset("text"),
            eval_dataset=make_dataset("text", 8, seed=7),
            processing_class=make_tokenizer(),
        )
        trainer.train()
        losses[base] = [row["loss"] for row in figures(trainer) if "loss" in row]
        after = [weight.cpu() for weight in weights(trainer.model)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(before, after, strict=True))
        if base == "fp8":
            assert_line(trainer, "frozen_base", path="fp8")
    assert losses["fp8"] == pytest.approx(losses["as_loaded"], rel=0.01)
    assert losses["fp8"] != losses["as_loaded"]


def test_merging_on_a_side_stream_quantizes_a_4_bit_base_as_on_the_default_one() -> None:
    """bitsandbytes quantizes on the default stream, and reads the scales on the current one."""
    found = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.manual_seed(0)
        linear = torch.nn.Linear(8192, 8192, bias=False)
        model: Any = torch.nn.Sequential(quantized_linear(linear, "nf4", nested=True, dtype=torch.bfloat16))
        model.is_loaded_in_4bit = True
        adapters = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        made = get_peft_model(model, adapters).cuda()
        assert apply_lora(made, compute_dtype=torch.bfloat16).fast
        layer = made.base_model.model[0]
        with torch.cuda.stream(stream):
            for _ in range(5):
                layer.merge()
                layer.unmerge()
            torch.cuda.synchronize()
        found.append((layer.base_layer.weight, layer.base_layer.weight.quant_state.absmax))
    assert all(map(torch.equal, *found))
