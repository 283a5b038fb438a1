"""The kernels of the experts block: gate, combine and grouped products."""

from __future__ import annotations

import pytest
import torch
from moe_material import GATES, gate_case, gate_name, norm_of_difference, reference_gate, routed
from old_device import forced_capability

from fastpack_trl.kernels.combine import bias_weight_grad, combine
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.grouped import aligned_rank, grouped_mm, grouped_outer, grouped_sum, reads_offsets
from fastpack_trl.moe.routing import routing_plan


@pytest.mark.parametrize("gate", GATES, ids=gate_name)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gate_forward_and_backward_equal_autograd_in_float64(gate: Gate, bias: bool, dtype: torch.dtype) -> None:
    h, table, expert, grad, weight = gate_case(dtype, bias=bias)
    kept = [None if tensor is None else tensor.clone() for tensor in (h, table, grad, weight)]
    a = gate_forward(h, table, expert, gate)
    found = gate_backward(h, table, expert, gate, grad, weight)
    leaf, weights = h.double().requires_grad_(), weight.double().requires_grad_()
    exact = reference_gate(leaf, None if table is None else table.double(), expert, gate)
    weighted = exact * weights[:, None]
    grads = torch.autograd.grad(weighted, (leaf, weights), grad.double())
    # In the same dtype through autograd: what stock would compute.
    own = h.clone().requires_grad_(), weight.clone().requires_grad_()
    plain = reference_gate(own[0], table, expert, gate)
    theirs = torch.autograd.grad(plain * own[1][:, None], own, grad)
    floor = 4 * torch.finfo(dtype).eps
    for mine, stock, truth in (
        (a, plain, exact), (found[0], theirs[0], grads[0]), (found[1], plain * own[1][:, None], weighted),
        (found[2], theirs[1], grads[1]),
    ):  # fmt: skip
        assert norm_of_difference(mine.detach(), truth) <= max(1.1 * norm_of_difference(stock, truth), floor)
    for before, now in zip(kept, (h, table, grad, weight), strict=True):
        assert before is None or torch.equal(before, now)  # inputs are left alone


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_equals_the_sum_over_slots(dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None) -> None:
    ids, weights = routed(19, 3, 5)
    plan = routing_plan(ids, 5)
    rows, table = torch.randn(57, 24).to(dtype), torch.randn(5, 24).to(dtype) if bias else None
    scale = None if weights_dtype is None else weights.to(weights_dtype)
    found = combine(rows, plan.inverse, scale, bias_eh=table, ids_tk=ids)
    slots = rows.double()[plan.inverse.long().reshape(-1)].view(19, 3, 24)
    slots = slots if table is None else slots + table.double()[ids]
    exact = (slots if scale is None else slots * scale.double()[..., None]).sum(1)
    assert found.dtype == dtype
    assert norm_of_difference(found, exact) <= 2 * torch.finfo(dtype).eps


def test_gradient_of_the_routing_weights_through_the_bias() -> None:
    ids, _ = routed(19, 3, 5)
    grad, table = torch.randn(19, 24), torch.randn(5, 24)
    exact = (grad.double()[:, None] * table.double()[ids]).sum(-1)
    assert norm_of_difference(bias_weight_grad(grad, table, ids), exact) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 3], ids=["aligned", "unaligned"])
def test_grouped_products_with_an_empty_group(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, y, weight = torch.randn(10, 16).to(dtype), torch.randn(10, width).to(dtype), torch.randn(3, 16, width).to(dtype)
    offsets = torch.tensor([4, 4, 10], dtype=torch.int32)
    parts = [(0, 4), (4, 4), (4, 10)]
    product = torch.cat([x[a:b].double() @ weight[e].double() for e, (a, b) in enumerate(parts)])
    outer = torch.stack([x[a:b].double().t() @ y[a:b].double() for a, b in parts])
    sums = torch.stack([y[a:b].double().sum(0) for a, b in parts])
    bound = 2 * torch.finfo(dtype).eps
    for ends in (offsets, tuple(offsets.tolist())):  # on the device, and read before
        assert norm_of_difference(grouped_mm(x, weight, ends), product) <= bound
        assert norm_of_difference(grouped_outer(x, y, ends), outer) <= bound
        assert norm_of_difference(grouped_sum(y, ends), sums) <= bound


@pytest.mark.parametrize(
    ("rank", "dtype", "padded"), [(4, torch.bfloat16, 8), (3, torch.float32, 4), (16, torch.half, 16)]
)
def test_rank_is_rounded_up_to_sixteen_bytes(rank: int, dtype: torch.dtype, padded: int) -> None:
    assert aligned_rank(rank, dtype) == padded


@pytest.mark.parametrize(
    ("capability", "dtype", "reads"),
    [((9, 0), torch.bfloat16, False), ((10, 0), torch.bfloat16, False), ((9, 0), torch.half, True),
     ((8, 0), torch.bfloat16, True), ((12, 0), torch.bfloat16, True)],
)  # fmt: skip
def test_grouped_products_read_offsets_on_the_host_but_in_bf16_on_hopper_and_blackwell(
    capability: tuple[int, int], dtype: torch.dtype, reads: bool
) -> None:
    with forced_capability(capability):
        assert reads_offsets(dtype, torch.device("cuda", 0)) == reads
    assert not reads_offsets(dtype, torch.device("cpu"))
