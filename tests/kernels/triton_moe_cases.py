"""Triton kernels of the experts block beside their torch twins: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from moe_material import GATES, KERNEL_GATES, gate_case, gate_name, norm_of_difference, reference_gate, routed

from fastpack_trl.kernels.combine import combine
from fastpack_trl.kernels.combine_triton import combine_triton
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.gate_triton import gate_backward_triton, gate_forward_triton
from fastpack_trl.moe.routing import routing_plan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def on_device(values: Any) -> list[Any]:
    return [value if value is None else value.to(DEVICE) for value in values]


def twin(function: Any, *values: Any, **named: Any) -> Any:
    """Compute in plain torch: on the CPU, where no kernel runs."""
    moved = [value.cpu() if isinstance(value, torch.Tensor) else value for value in values]
    named = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    found = function(*moved, **named)
    return found.to(DEVICE) if isinstance(found, torch.Tensor) else on_device(found)


@pytest.mark.parametrize("gate", KERNEL_GATES, ids=gate_name)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(gate: Gate, bias: bool, dtype: torch.dtype) -> None:
    h, table, expert, grad, weight = on_device(gate_case(dtype, bias=bias, rows=11))
    wide = [None if value is None else value.double() for value in (h, table)]
    exact = reference_gate(wide[0], wide[1], expert, gate)
    found, plain = gate_forward_triton(h, table, expert, gate), twin(gate_forward, h, table, expert, gate)
    floor = 2 * torch.finfo(dtype).eps  # a device's exponential may be off by two units
    assert norm_of_difference(found, exact) <= max(1.1 * norm_of_difference(plain, exact), floor)
    truth = twin(gate_backward, wide[0], wide[1], expert, gate, grad.double(), weight.double())
    ours = gate_backward_triton(h, table, expert, gate, grad, weight)
    twins = twin(gate_backward, h, table, expert, gate, grad, weight)
    for mine, other, value in zip(ours, twins, truth, strict=True):
        assert mine.dtype == other.dtype
        assert norm_of_difference(mine, value) <= max(1.1 * norm_of_difference(other, value), floor)


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None) -> None:
    ids, weights = routed(7, 3, 5)
    plan = routing_plan(ids, 5)
    rows, table = torch.randn(21, 40).to(dtype), torch.randn(5, 40).to(dtype) if bias else None
    scale = None if weights_dtype is None else weights.to(weights_dtype)
    rows, inverse, scale, table, ids = on_device([rows, plan.inverse, scale, table, ids])
    wide = [None if value is None else value.double() for value in (rows, scale, table)]
    exact = twin(combine, wide[0], inverse, wide[1], bias_eh=wide[2], ids_tk=ids)
    for out in (None, torch.float32):
        options = {"bias_eh": table, "ids_tk": ids, "dtype": out}
        found, plain = combine_triton(rows, inverse, scale, **options), twin(combine, rows, inverse, scale, **options)
        assert found.dtype == plain.dtype
        assert norm_of_difference(found, exact) <= max(1.1 * norm_of_difference(plain, exact), torch.finfo(dtype).eps)


def test_no_rows() -> None:
    h, expert = torch.zeros(0, 32, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert gate_forward_triton(h, None, expert, GATES[0]).shape == (0, 16)
    grads = gate_backward_triton(h, None, expert, GATES[0], h[:, :16], h[:, 0])
    assert [tuple(grad.shape) for grad in grads] == [(0, 32), (0, 16), (0,)]
    inverse = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    assert combine_triton(h, inverse).shape == (0, 32)


@pytest.mark.parametrize("gate", KERNEL_GATES, ids=gate_name)
def test_nan_stays_in_its_row(gate: Gate) -> None:
    h, table, expert, grad, weight = on_device(gate_case(torch.float32, rows=11))
    h[5] = float("nan")
    a = gate_forward_triton(h, table, expert, gate)
    assert a.isnan().any(1).nonzero().tolist() == [[5]]
    for value in gate_backward_triton(h, table, expert, gate, grad, weight)[:2]:
        assert value.isnan().any(1).nonzero().tolist() == [[5]]


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    """A model over several devices: the current one stays the first."""
    h, table, expert, grad, weight = (value.to("cuda:1") for value in gate_case(torch.float32))
    ids, weights = (value.to("cuda:1") for value in routed(19, 3, 5))
    found = [gate_forward_triton(h, table, expert, GATES[2])]
    found += gate_backward_triton(h, table, expert, GATES[2], grad, weight)
    expected = [twin(gate_forward, h, table, expert, GATES[2])]
    expected += twin(gate_backward, h, table, expert, GATES[2], grad, weight)
    rows, plan = torch.randn(57, 40, device="cuda:1"), routing_plan(ids, 5)
    found.append(combine_triton(rows, plan.inverse, weights))
    expected.append(twin(combine, rows, plan.inverse, weights))
    assert all(norm_of_difference(mine.cpu(), other.cpu()) <= 1e-6 for mine, other in zip(found, expected, strict=True))
    assert torch.cuda.current_device() == 0
