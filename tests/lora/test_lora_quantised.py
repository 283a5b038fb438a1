"""LoRA over bitsandbytes bases: what PEFT computes, the weight dequantised per use and never saved."""

from __future__ import annotations

import copy

import pytest
import torch
from counted_operators import Counted
from lora_material import (
    any_ids,
    assert_trains_as_peft,
    functions_for_every_size,  # noqa: F401
    quantised,
    quantised_linear,
    reference_projection,
    saved_bytes,
    step,
)

from fastpack_trl import apply_lora
from fastpack_trl.lora import report as lora_report
from fastpack_trl.lora.base_weight import from_4bit
from fastpack_trl.lora.projection import lora_projection

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


def test_a_base_with_another_16_bit_compute_dtype_than_the_run_is_pefts() -> None:
    """TRL's QLoRA notebook sets ``bnb_4bit_compute_dtype=torch.float16`` and trains in bf16."""
    stock = quantised("nf4", compute=torch.float16)
    for compute_dtype, named in ((torch.bfloat16, "handed_over"), (None, "call_by_call")):
        fast = copy.deepcopy(stock)
        report = apply_lora(fast, compute_dtype=compute_dtype)
        assert torch.equal(*(step(model, any_ids(), autocast=True) for model in (stock, fast)))
        said = "bnb_4bit_compute_dtype=torch.float16 in a run in torch.bfloat16" if compute_dtype else "base Linear4bit"
        assert all(said in reason for reason in getattr(report, named))
        assert sum(map(len, report.handed_over.values())) + sum(report.call_by_call.values()) == 14


def test_a_4_bit_weight_is_dequantised_once_per_use_and_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, kept = {}, {}
    for name in ("stock", "fast", "cached"):
        model = quantised("nf4", dtype=torch.bfloat16)
        if name != "stock":
            monkeypatch.setattr(
                lora_report, "copy_budget", lambda device, name=name: 2**40 if name == "cached" else None
            )
            apply_lora(model)
        kept[name] = saved_bytes(model, any_ids(48))
        with Counted(lambda name, _args: name == "dequantize_4bit") as counted:
            step(model, any_ids(48), autocast=True)
        counts[name] = counted.count
    # 14 uses forward; backward leaves out the three that read the embedded tokens, which need no gradient.
    assert counts["fast"] == 14 + 11
    assert counts["cached"] == 0
    assert kept["fast"] == kept["cached"] < kept["stock"]
