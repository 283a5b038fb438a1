"""The kernels of the experts block: gate, combine and grouped products."""

from __future__ import annotations

import pytest
import torch
from moe_material import GATES, assert_as_near, autograd_gate, combine_case, distance, gate_case, gate_name
from old_device import forced_capability

from fastpack_trl.kernels.combine import bias_weight_grad, combine
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate, passes_at_bounds
from fastpack_trl.kernels.grouped import aligned_rank, grouped_mm, grouped_outer, grouped_sum, reads_offsets

BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])


@pytest.mark.parametrize("gate", GATES, ids=gate_name)
@BIAS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gate_forward_and_backward_equal_autograd_in_float64(gate: Gate, bias: bool, dtype: torch.dtype) -> None:
    h, table, expert, grad, weight = case = gate_case(dtype, bias=bias)
    before = [None if tensor is None else tensor.clone() for tensor in case]
    actual = [gate_forward(h, table, expert, gate), *gate_backward(h, table, expert, gate, grad, weight)]
    exact, stock = (autograd_gate(case, gate, each) for each in (torch.float64, dtype))
    assert_as_near(actual, stock, exact, 4 * torch.finfo(dtype).eps)
    for old, now in zip(before, case, strict=True):
        assert old is None or (torch.equal(old, now) and not now.requires_grad)  # inputs are left alone


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_equals_the_sum_over_slots(dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None) -> None:
    arguments, keywords, exact = combine_case(dtype, bias, weights_dtype)
    actual, eps = combine(*arguments, **keywords), torch.finfo(dtype).eps
    assert actual.dtype == dtype
    assert distance(actual, exact) <= 2 * eps
    if bias:  # the gradient of the routing weights through the bias
        grad, (table, ids) = torch.randn(19, 40).to(dtype), keywords.values()
        exact = (grad.double()[:, None] * table.double()[ids]).sum(-1)
        assert distance(bias_weight_grad(grad, table, ids), exact) <= 8 * eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 3], ids=["aligned", "unaligned"])
def test_grouped_products_with_an_empty_group(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, y, weight = torch.randn(10, 16).to(dtype), torch.randn(10, width).to(dtype), torch.randn(3, 16, width).to(dtype)
    offsets, parts = torch.tensor([4, 4, 10], dtype=torch.int32), [(0, 4), (4, 4), (4, 10)]
    product = torch.cat([x[a:b].double() @ weight[e].double() for e, (a, b) in enumerate(parts)])
    outer = torch.stack([x[a:b].double().t() @ y[a:b].double() for a, b in parts])
    sums = torch.stack([y[a:b].double().sum(0) for a, b in parts])
    for ends in (offsets, tuple(offsets.tolist())):  # on the device, and read before
        results = grouped_mm(x, weight, ends), grouped_outer(x, y, ends), grouped_sum(y, ends)
        for actual, exact in zip(results, (product, outer, sums), strict=True):
            assert distance(actual, exact) <= 2 * torch.finfo(dtype).eps


def test_sizes_and_devices_of_torchs_grouped_product() -> None:
    """Ranks of 16 bytes; offsets are read on the host but in bf16 on Hopper and Blackwell; bounds in an evaluation."""
    passes_at_bounds.cache_clear()
    with torch.inference_mode():
        assert isinstance(passes_at_bounds(), bool)
    ranks = [aligned_rank(4, torch.bfloat16), aligned_rank(3, torch.float32), aligned_rank(16, torch.half)]
    assert ranks == [8, 4, 16]
    for capability, dtype, reads in (
        *(((major, 0), torch.bfloat16, major not in (9, 10)) for major in (8, 9, 10, 12)),
        ((9, 0), torch.half, True),
    ):
        with forced_capability(capability):
            assert reads_offsets(dtype, torch.device("cuda", 0)) == reads
    assert not reads_offsets(torch.bfloat16, torch.device("cpu"))
