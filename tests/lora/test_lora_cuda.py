"""LoRA without glue on a CUDA device: bf16 accuracy, 4-bit bases, no host wait, fewer launches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counted_operators import kernels_of
from lora_material import adapted, any_ids, assert_host_never_waits, assert_no_further, joint_error

from benchmarks.models import quantize
from fastpack_trl import apply_lora
from fastpack_trl.lora import report as lora_report
from fastpack_trl.testing import gradients, tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"hidden_size": 256, "intermediate_size": 512}


def step(model: Any, ids: torch.Tensor, *, autocast: bool = True) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


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


@pytest.mark.parametrize("kind", ["dense", "nf4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_never_waits(kind: str, compiled: bool) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    model = qlora() if kind == "nf4" else adapted("llama", dtype=torch.bfloat16, **SHAPE).cuda()
    apply_lora(model, compute_dtype=torch.bfloat16)
    assert_host_never_waits(model, compiled=compiled)


def test_a_step_launches_fewer_kernels_than_with_peft() -> None:
    counts = {}
    for name in ("stock", "fast"):
        model = adapted("llama", dtype=torch.bfloat16, **SHAPE).cuda()
        if name == "fast":
            apply_lora(model, compute_dtype=torch.bfloat16)
        step(model, any_ids(64).cuda())
        counts[name] = kernels_of(lambda model=model: step(model, any_ids(64).cuda()))
    assert counts["stock"] >= 1.2 * counts["fast"], counts
