"""Experts in compiled graphs: no graph break, the same figures, with LoRA and under checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_material import adapted, assert_as_stock, distance, experts_of, moe_model, routed, step
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.block import LowRank, _stack
from fastpack_trl.moe.experts import Form, Stack, StackForm, _experts
from fastpack_trl.moe.layout import STACKS
from fastpack_trl.moe.quantized import quantize_experts
from fastpack_trl.moe.routing import routing_plan
from fastpack_trl.testing import assert_gradients_close, gradients


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _step(block: Any, module: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, grad = torch.randn(1, 24, 32, requires_grad=True), torch.randn(1, 24, 32)
    module.zero_grad()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), {"x": x.grad, **gradients(module)}


@pytest.mark.parametrize(
    ("family", "lora", "act"),
    [
        ("gpt_oss", False, ""),
        ("gpt_oss", True, ""),
        ("qwen3_moe", True, ""),
        ("deepseek_v3", False, ""),
        ("qwen3_moe", False, "gelu"),
    ],
)
def test_experts_compile_without_graph_breaks_and_own_gates_are_stocks(family: str, lora: bool, act: str) -> None:
    model = adapted(family) if lora else moe_model(family, **{"hidden_act": act} if act else {})
    layers = model.base_model.model.model.layers if lora else model.model.layers
    mlp = layers[0].mlp
    expected, grads = _step(mlp, mlp)
    with apply_moe(model):
        found, ours = _step(torch.compile(mlp, backend="aot_eager", fullgraph=not act), mlp)
    assert distance(found, expected) <= 1e-6
    assert_gradients_close(ours, grads, rtol=1e-5)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around-with-expert-lora"])
def test_compiled_layers_inside_of_a_checkpoint_and_around_it(around: bool) -> None:
    model = adapted("qwen3_moe", num_hidden_layers=1) if around else moe_model("qwen3_moe")
    layers = (model.base_model.model if around else model).model.layers
    if around:
        model.enable_input_require_grads()
    expected = step(model)
    with apply_moe(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            (layer if around else layer.mlp).compile(backend="aot_eager", fullgraph=True)
        assert_as_stock(model, expected)


def test_operator_passes_torchs_own_checks() -> None:
    module = experts_of(moe_model("gpt_oss"))
    ids, weights = routed(6, 2, 4)
    x = torch.randn(6, 32, requires_grad=True)
    factors = [torch.randn(4, 4, width, requires_grad=True) for width in (32, 96, 48, 32)]
    up = Stack(module.gate_up_proj, module.gate_up_proj_bias, *factors[:2])
    down = Stack(module.down_proj, module.down_proj_bias, *factors[2:])
    form = Form(Gate("clamped", True, 1.702, 7.0), True, StackForm(2.0), StackForm(0.5))
    arguments = (x, weights.requires_grad_(), *routing_plan(ids, 4), *up, *down, *form.flat())
    torch.library.opcheck(
        _experts, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("needed", ["all", "factors", "factors of packed stacks"])
def test_flops_of_the_operator_are_those_of_the_products(needed: str) -> None:
    module = experts_of(moe_model("qwen3_moe"))
    ids, weights = routed(6, 2, 4)
    x = torch.randn(6, 32, requires_grad=True)
    factors = [LowRank(*(torch.randn(4, 4, n, requires_grad=True) for n in widths)) for widths in ((32, 32), (16, 32))]
    module.requires_grad_(needed == "all")
    if needed.endswith("packed stacks"):
        pytest.importorskip("bitsandbytes")
        quantize_experts(torch.nn.ModuleList([module]))
    (up, up_form), (down, down_form) = (_stack(module, *each) for each in zip(STACKS, factors, strict=True))
    form = Form(Gate("silu"), False, up_form, down_form)
    with FlopCounterMode(display=False) as counter:
        out, *_ = _experts(x, weights, *routing_plan(ids, 4), *up, *down, *form.flat())
        out.sum().backward()
    slots, stacks, low = 12, 32 * 32 + 16 * 32, [4 * 32, 4 * 32, 4 * 16, 4 * 32]
    forward = backward = stacks + sum(low)
    weight_gradients = sum(low) + (stacks if needed == "all" else 0)
    assert counter.get_total_flops() == 2 * slots * (forward + backward + weight_gradients)
