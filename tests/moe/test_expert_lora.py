"""LoRA on expert stacks against PEFT: the same function, gradients, files and switches, without a dense delta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_material import (
    FAMILIES,
    STACKS,
    adapted,
    assert_as_stock,
    distance,
    experts_of,
    input_ids,
    moe_model,
    randomised,
    routed,
    step,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.testing import gradients


@pytest.mark.parametrize(
    ("family", "how", "frozen"),
    [
        *((family, {"r": r}, "nothing") for family in FAMILIES for r in (4, 3)),
        *(("qwen3_moe", {"stacks": [s]}, "nothing") for s in STACKS),
        *(("qwen3_moe", {}, factor) for factor in ("lora_A", "lora_B")),
    ],
    ids=str,
)
def test_logits_and_adapter_gradients_equal_peft(family: str, how: dict[str, Any], frozen: str) -> None:
    model = adapted(family, **how)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and frozen not in name)
    expected = step(model)
    assert any("experts" in name for name in expected[1])
    with apply_moe(model) as report:
        assert len(report.adapters) == 2
        assert {line.path for line in report.adapters} == {"fastpack"}, report
        assert_as_stock(model, expected)
    assert not any("forward" in vars(module) for module in model.modules())
    again, _ = step(model)
    assert torch.equal(again, expected[0])
    with apply_moe(model, lora=False) as report:  # PEFT's wrappers around our experts
        assert not report.adapters
        assert_as_stock(model, expected)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_bf16_experts_with_fp32_adapters_are_as_exact_as_peft(family: str) -> None:
    model = adapted(family)
    module = experts_of(model)
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # as PEFT keeps adapters
    ids, weights = routed(300, 2, 4)
    x, grad = torch.randn(300, 32).bfloat16(), torch.randn(300, 32).bfloat16()

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        wrapper.zero_grad()
        inputs = [value.bfloat16().to(dtype).clone().requires_grad_() for value in (x, weights)]
        out = wrapper(inputs[0], ids, inputs[1])
        out.backward(grad.to(dtype))
        return {"out": out.detach(), "dx": inputs[0].grad, "dw": inputs[1].grad, **gradients(wrapper)}

    peft = run(torch.bfloat16)
    with apply_moe(model):
        ours = run(torch.bfloat16)
        assert {value.dtype for name, value in ours.items() if "lora" in name} == {torch.float32}
    model.double()
    module.config._experts_implementation_internal = "eager"
    exact = run(torch.float64)
    errors = [distance(ours[name], v) / distance(peft[name], v) for name, v in exact.items()]
    assert max(errors) <= 1.5  # of one figure it depends on the order in which a processor adds
    assert sum(errors) <= 1.2 * len(errors)


class _Made(TorchDispatchMode):
    """The operations of a step, and the sizes of the tensors that they make; views of parameters are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self.shapes: set[tuple[int, ...]] = set()
        self.names = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names += f"{func} "
        if isinstance(out, Tensor) and out.data_ptr() not in self.parameters:
            self.shapes.add(tuple(out.shape))
        return out


def test_neither_a_dense_delta_nor_a_dense_gradient_of_a_stack_is_made() -> None:
    model = adapted()
    stacks = {tuple(experts_of(model).gate_up_proj.shape), tuple(experts_of(model).down_proj.shape)}
    stacks |= {(e, b, a) for e, a, b in stacks}
    with _Made(model) as peft:
        step(model)
    assert stacks & peft.shapes
    with apply_moe(model), _Made(model) as ours:
        step(model)
    assert not stacks & ours.shapes
    assert (48, 4) in ours.shapes  # x A^T of 24 tokens at two experts each, as wide as its rank
    assert "index_put" not in ours.names
    assert "baddbmm" not in ours.names


def test_adapters_are_saved_and_loaded_by_peft_both_ways(tmp_path: Path) -> None:
    model = adapted("gpt_oss")
    model.save_pretrained(tmp_path / "stock")
    logits, _ = step(model)
    with apply_moe(model):
        model.save_pretrained(tmp_path / "ours")
        stock, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stock", "ours"))
        assert stock.keys() == ours.keys()
        assert all(torch.equal(ours[name], value) for name, value in stock.items())
    loaded = PeftModel.from_pretrained(moe_model("gpt_oss"), tmp_path / "stock", is_trainable=True)
    with apply_moe(loaded.train()) as report:
        assert {line.path for line in report.adapters} == {"fastpack"}
        found, _ = step(loaded)
    assert distance(found, logits) <= 1e-5


def test_merge_unmerge_and_disabled_adapters_are_pefts() -> None:
    model = adapted()
    plain = adapted()
    with apply_moe(model) as report:
        with_adapter, _ = step(model)
        with model.disable_adapter():
            without = model(input_ids=input_ids(), use_cache=False).logits.detach()
        with plain.disable_adapter():
            assert distance(without, plain(input_ids=input_ids(), use_cache=False).logits) <= 1e-5
        model.merge_adapter()
        plain.merge_adapter()
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
        merged = model(input_ids=input_ids(), use_cache=False).logits.detach()
        assert distance(merged, with_adapter) <= 1e-5
        model.unmerge_adapter()
        unmerged, _ = step(model)
        assert distance(unmerged, with_adapter) <= 1e-5
        assert report.active == 2
    merged_model = model.merge_and_unload()
    assert distance(merged_model(input_ids=input_ids(), use_cache=False).logits, with_adapter) <= 1e-5


def test_several_adapters_are_handed_to_peft_by_name_and_a_single_one_comes_back() -> None:
    model = adapted()
    config = LoraConfig(r=2, target_parameters=STACKS, target_modules=["q_proj"])
    model.add_adapter("second", config)
    randomised(model)
    model.base_model.set_adapter(["default", "second"])
    expected = step(model)
    with apply_moe(model) as report:
        assert {line.reason for line in report.adapters} == {"2 adapters are active"}
        assert_as_stock(model, expected)
        model.set_adapter("second")
        second, _ = step(model)
    expected_second, _ = step(model)
    assert distance(second, expected_second) <= 1e-5


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "expert-lora"])
def test_decoding_is_stock_bit_for_bit(lora: bool) -> None:
    model = (adapted if lora else moe_model)("gpt_oss").eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
    stock = model.generate(input_ids=input_ids(6), return_dict_in_generate=True, **options)
    with apply_moe(model):
        ours = model.generate(input_ids=input_ids(6), return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, stock.logits, strict=True))


def test_a_router_wrapped_by_all_linear_is_trained_as_in_peft_and_warned_about() -> None:
    model = randomised(get_peft_model(moe_model("qwen3_moe"), LoraConfig(r=4, target_modules="all-linear")))
    expected = step(model)
    assert any(".gate." in name for name in expected[1])
    with apply_moe(model) as report:
        assert report.warnings
        assert "LoRA wraps the router" in str(report)
        assert_as_stock(model, expected)


def test_applied_twice_and_before_peft() -> None:
    config = LoraConfig(r=4, target_parameters=STACKS)
    plain = moe_model("qwen3_moe")
    first = apply_moe(plain)
    model = randomised(get_peft_model(plain, config))
    second, third = apply_moe(model), apply_moe(model)
    assert {line.reason for line in second.layers} == {"applied before"}
    assert {line.path for report in (second, third) for line in report.adapters} == {"fastpack"}
    ours = step(model)
    for report in (third, second, first, first):
        report.revert()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._experts_implementation == "grouped_mm"
    assert_as_stock(model, ours)
