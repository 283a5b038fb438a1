"""The experts block against float64 and against stock, in every family."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from counted_operators import Counted
from moe_material import FAMILIES, adapted, assert_as_stock, distance, experts_of, input_ids, moe_model, routed, step
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from fastpack_trl.kernels import grouped
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.block import NAME
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.testing import assert_gradients_close, count_host_syncs, gradients


def _run(module: Any, function: Any, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of an experts module."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    module.zero_grad()
    out = function(x, ids, weights)
    out.backward(grad)
    return {"out": out.detach(), "dx": x.grad, "dweights": weights.grad, **gradients(module)}


def _eager(module: Any) -> Any:
    """Stock's loop over the experts."""

    def run(*args: Any) -> Tensor:
        name = module.config._experts_implementation_internal
        module.config._experts_implementation_internal = "eager"
        try:
            return module(*args)
        finally:
            module.config._experts_implementation_internal = name

    return run


def _assert_as_exact_as_eager(module: Any, values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """In half precision, beside float64; return what ours gave."""
    x, ids, weights, grad = values
    ours, eager = (_run(module, function, *values) for function in (module, _eager(module)))
    exact = _run(module.double(), _eager(module), x.double(), ids, weights.double(), grad.double())
    for name, value in exact.items():
        bound = 1.1 * distance(eager[name], value)
        assert distance(ours[name], value) <= bound, name
    return ours


def _case(family: str, dtype: torch.dtype, tokens: int = 40, **how: Any) -> tuple[Any, tuple[Tensor, ...]]:
    model = moe_model(family)
    module = experts_of(model)
    ids, weights = routed(tokens, how.pop("top_k", 2), 4, **how)
    x, grad = torch.randn(tokens, 32) * 2, torch.randn(tokens, 32)
    apply_moe(model)
    return module.to(dtype), (x.to(dtype), ids, weights.to(dtype), grad.to(dtype))


@pytest.mark.parametrize(
    ("family", "routing"),
    [
        *((family, {"skew": skew}) for family in FAMILIES for skew in ("uniform", "hot", "empty")),
        *((family, {"skew": "hot", "top_k": 1}) for family in ("gpt_oss", "qwen3_moe")),  # all tokens at one expert
        *(("gpt_oss", {"tokens": tokens, "top_k": top_k}) for tokens in (1, 9) for top_k in (1, 4)),
    ],
    ids=str,
)
def test_block_equals_float64_in_output_and_every_gradient(family: str, routing: dict[str, Any]) -> None:
    module, (x, ids, weights, grad) = _case(family, torch.float32, **routing)
    ours = _run(module, module, x, ids, weights, grad)
    exact = _run(module.double(), _eager(module), x.double(), ids, weights.double(), grad.double())
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert ours[name].shape == value.shape
        assert distance(ours[name], value) <= 1e-6, name


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_block_is_as_exact_as_eager_in_half_precision(family: str, dtype: torch.dtype) -> None:
    _assert_as_exact_as_eager(*_case(family, dtype, tokens=400))


def test_fp32_input_and_weights_beside_bf16_experts_follow_stock() -> None:
    module, (x, ids, weights, grad) = _case("qwen3_moe", torch.bfloat16)
    x, weights, grad = x.float(), weights.float(), grad.float()
    ours = _run(module, module, x, ids, weights, grad)
    stock = _run(module, partial(grouped_mm_experts_forward, module), x, ids, weights, grad)
    for name, value in stock.items():
        assert ours[name].dtype == value.dtype
        assert distance(ours[name], value) <= 1e-2, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_no_token_gives_an_empty_output_and_zero_gradients(family: str, device: str) -> None:
    module, values = _case(family, torch.float32, tokens=0)
    module = module.to(device)
    ours = _run(module, module, *(value.to(device) for value in values))
    assert ours["out"].shape == (0, 32)
    assert ours.keys() >= {name for name, _ in module.named_parameters()}
    assert not any(value.any() for value in ours.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_of_a_token_stays_in_that_token_through_the_router_too(family: str) -> None:
    model = moe_model(family).requires_grad_(False)
    block = model.get_submodule(next(iter(experts_modules(model))).rpartition(".")[0])
    x = torch.randn(1, 24, 32)
    x[0, 7] = float("nan")
    x.requires_grad_()
    with apply_moe(model):
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
    for value in (out, x.grad):
        assert value[0].isnan().any(1).nonzero().tolist() == [[7]]


def test_frozen_experts_get_no_gradient_and_save_the_input_the_pre_activation_and_the_plan_only() -> None:
    module, (x, ids, weights, _grad) = _case("qwen3_moe", torch.float32)
    module.requires_grad_(False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda t: t):
        out = module(x.requires_grad_(), ids, weights.requires_grad_())
    slots, inner = ids.numel(), module.gate_up_proj.shape[1]
    frozen = {id(parameter) for parameter in module.parameters()}
    sizes = sorted(tensor.numel() * tensor.element_size() for tensor in saved if id(tensor) not in frozen)
    assert sum(sizes) == 4 * (x.numel() + slots * inner + weights.numel() + 3 * slots + module.num_experts)
    out.sum().backward()
    assert not gradients(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_equals_stock_and_is_restored(family: str) -> None:
    model = moe_model(family)
    stock_name = model.config._experts_implementation
    expected = step(model)
    report = apply_moe(model)
    assert report.active == len(report.layers) == 2, report
    assert model.config._experts_implementation == NAME
    assert_as_stock(model, expected, rtol=2e-5)
    report.revert()
    assert model.config._experts_implementation == stock_name
    assert not any(hasattr(module, "_fastpack_moe") for module in model.modules())
    again, _ = step(model)
    assert torch.equal(again, expected[0])


def test_what_is_not_covered_keeps_stock_by_name_and_reason() -> None:
    model = moe_model("qwen3_moe")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first.has_post_expert_norm = True
    with apply_moe(model) as report:
        assert [(line.path, line.reason) for line in report.layers] == [
            ("stock", "a norm follows each expert"), (NAME, ""),
        ]  # fmt: skip
        first.has_post_expert_norm = False
        ids, weights = routed(5, 2, 4)
        x = torch.randn(5, 32)
        assert torch.equal(first(x, ids, weights), grouped_mm_experts_forward(first, x, ids, weights))
    for flag, value, reason in (("has_gate", False, "without a gate"), ("_is_expert_parallel", True, "parallel")):
        before = getattr(second, flag, False)  # transformers 5.17 has not all of them
        setattr(second, flag, value)
        with apply_moe(model) as report:
            assert reason in report.layers[1].reason
        setattr(second, flag, before)


def test_sharded_stacks_keep_stock() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = moe_model("qwen3_moe")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stack = experts_of(model).down_proj
        sharded = distribute_tensor(stack.data, init_device_mesh("cpu", (1,)), [Shard(0)])
        experts_of(model).down_proj = torch.nn.Parameter(sharded)
        with apply_moe(model) as report:
            assert [line.reason for line in report.layers] == ["down_proj is a DTensor", ""]
    finally:
        torch.distributed.destroy_process_group()


def test_a_gate_of_the_models_own_is_called_and_differentiated() -> None:
    model = moe_model("qwen3_moe", hidden_act="gelu")
    expected = step(model)
    with apply_moe(model) as report:
        assert {layer.reason for layer in report.layers} == {"the model's own gate"}
        assert_as_stock(model, expected)


def test_routing_weights_for_every_expert_are_read_at_the_chosen_ones() -> None:
    module, (x, ids, weights, grad) = _case("gpt_oss", torch.float32)
    everywhere = torch.zeros(len(ids), 4).scatter(1, ids, weights)
    chosen, scattered = (_run(module, module, x, ids, given, grad) for given in (weights, everywhere))
    assert torch.equal(chosen["out"], scattered["out"])
    assert torch.equal(chosen["dweights"], scattered["dweights"].gather(1, ids))


def _device_case(family: str, device: str, dtype: torch.dtype, lora: bool) -> tuple[Any, Any, tuple[Tensor, ...]]:
    model = (adapted if lora else moe_model)(family).to(device, dtype)
    block = (model.base_model.model if lora else model).model.layers[0].mlp.experts
    ids, weights = routed(64, 2, 4)
    values = torch.randn(64, 32), weights, torch.randn(64, 32)
    x, weights, grad = (value.to(device, dtype) for value in values)
    return model, block, (x.requires_grad_(), ids.to(device), weights.requires_grad_(), grad)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_sizes_that_products_read_are_read_once_in_each_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, block, (x, ids, weights, grad) = _device_case(family, "cpu", torch.float32, lora=True)
    reads: list[torch.dtype] = []
    sides = []
    for reading in (False, True):
        monkeypatch.setattr(grouped, "reads_offsets", lambda dtype, device, r=reading: bool(reads.append(dtype)) or r)
        x.grad = None
        model.zero_grad()
        with apply_moe(model), Counted(lambda name, _args: name == "_grouped_mm") as products:
            block(x, ids, weights).backward(grad)
        sides.append(({"x": x.grad, **gradients(model)}, products.count))
    assert reads == [torch.float32] * 4
    assert sides[0][1] >= 6
    assert sides[1][1] == 0
    assert_gradients_close(sides[1][0], sides[0][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_with_its_router_asks_the_device_nothing_and_sorts_once(family: str) -> None:
    model = moe_model(family)
    name = next(iter(experts_modules(model)))
    block = model.get_submodule(name.rpartition(".")[0])
    x = torch.randn(1, 24, 32, requires_grad=True)
    with apply_moe(model):
        with count_host_syncs(device="cpu") as syncs:
            out = block(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert syncs.total == 0, syncs
        with Counted(lambda name, _args: name in ("sort", "argsort", "_unique2") or "index_put" in name) as sorts:
            model(input_ids=input_ids(), use_cache=False).logits.sum().backward()
        assert sorts.count == 2  # layers


@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_block_is_on_another_device_or_needs_a_value(family: str, lora: bool) -> None:
    """On the meta device a tensor made on the host raises, and so does every look at a value."""
    model = (adapted if lora else moe_model)(family)
    with apply_moe(model) as report:  # reads the gate from values
        model.to("meta", torch.bfloat16)
        block = model.get_submodule(report.adapters[0].name if lora else report.layers[0].name)
        x, weights = (torch.empty(40, n, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (32, 2))
        block(x, torch.empty(40, 2, dtype=torch.int64, device="meta"), weights).sum().backward()
    grads: list[Any] = [*gradients(block).values(), x.grad, weights.grad]
    assert len(grads) > 2
    assert {gradient.device.type for gradient in grads} == {"meta"}


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_host_waits_on_cuda_only_to_read_sizes_once_in_each_pass(family: str, lora: bool, dtype: torch.dtype) -> None:
    model, block, (x, ids, weights, grad) = _device_case(family, "cuda", dtype, lora)
    with apply_moe(model):
        block(x, ids, weights).backward(grad)  # what is made once
        with count_host_syncs() as syncs:
            block(x, ids, weights).backward(grad)
    assert syncs.total == (2 if grouped.reads_offsets(dtype, x.device) else 0), syncs


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("family", "skew"), [(family, "uniform") for family in FAMILIES] + [("qwen3_moe", "empty"), ("qwen3_moe", "hot")]
)
def test_block_is_as_exact_as_eager_on_cuda_in_bf16(family: str, skew: str) -> None:
    module, values = _case(family, torch.bfloat16, tokens=400, skew=skew)
    module, on_device = module.cuda(), tuple(value.cuda() for value in values)
    before = _run(module, module, *on_device)
    ours = _assert_as_exact_as_eager(module, on_device)
    for name, value in ours.items():
        assert torch.equal(value, before[name]), name  # deterministic
