"""Each Triton kernel vs. its torch twin: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fp8_values import KINDS, matrix
from moe_material import KERNEL_GATES, gate_case, gate_name, norm_of_difference, reference_gate, routed
from quantised_material import dequantise_4bit_torch, packed_weight
from trl.kernels import chunked_logprob

from fastpack_trl.kernels.combine import combine
from fastpack_trl.kernels.combine_triton import combine_triton
from fastpack_trl.kernels.dequantise_triton import dequantise_4bit_triton
from fastpack_trl.kernels.fp8 import FP8, LARGEST, LEAST, Quantised, quantise_rows_torch
from fastpack_trl.kernels.fp8_triton import quantise_rows_triton, transposed_triton
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.gate_triton import gate_backward_triton, gate_forward_triton
from fastpack_trl.kernels.head_tiles import TorchTiles, TritonTiles
from fastpack_trl.moe.routing import routing_plan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
TRL = {
    "forward": chunked_logprob._forward_kernel, "backward": chunked_logprob._backward_kernel,
    "block_size": chunked_logprob._BLOCK_SIZE,
}  # fmt: skip


def moved(values: Any, device: str = DEVICE) -> list[Any]:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def twin(function: Any, *values: Any, **named: Any) -> Any:
    """Compute in plain torch: on the CPU, where no kernel runs."""
    result = function(*moved(values, "cpu"), **dict(zip(named, moved(named.values(), "cpu"), strict=True)))
    return result.to(DEVICE) if isinstance(result, torch.Tensor) else moved(result)


@pytest.mark.parametrize("shape", [(1, 4), (3, 65), (64, 64), (33 if DEVICE == "cuda" else 5, 1037)])
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@DTYPES
def test_4bit_weights(dtype: torch.dtype, kind: str, nested: bool, blocksize: int, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = packed_weight(shape, kind, nested=nested, blocksize=blocksize, dtype=dtype, device=DEVICE)
    code = functional.get_4bit_type(kind, device=DEVICE)
    dense = dequantise_4bit_triton(packed, state, code)
    assert (dense.dtype, dense.shape) == (dtype, shape)
    if DEVICE == "cuda":  # that of the CPU is compared with the twin in `test_dequantise.py`
        assert torch.equal(dense, functional.dequantize_4bit(packed, state))
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts off what bf16 has no bits for
        state.dtype = torch.float32
        bits = dequantise_4bit_torch(packed, state, code).view(torch.int32) >> 16
        assert torch.equal(dense.view(torch.int16).int(), bits)
    else:
        assert torch.equal(dense, dequantise_4bit_torch(packed, state, code))


@pytest.mark.parametrize(("shape", "width"), [((1, 16), None), ((5, 48), None), ((3, 256), 128), ((70, 384), 128)])
@pytest.mark.parametrize("folded", [False, True], ids=["plain", "folded"])
@pytest.mark.parametrize("kind", KINDS)
@DTYPES
def test_fp8_rows(dtype: torch.dtype, kind: str, folded: bool, shape: tuple[int, int], width: int | None) -> None:
    if (DEVICE, kind, dtype) == ("cpu", "subnormal", torch.bfloat16):
        pytest.skip("the interpreter reads such values as zeros")
    x = matrix(kind, shape, dtype).to(DEVICE)
    factor = torch.rand(shape[1], device=DEVICE) + 0.5 if folded else None
    # The interpreter loses carries and NaN when it rounds to FP8: there, torch rounds what the kernel has made.
    dtype = FP8 if DEVICE == "cuda" else torch.float32
    actual = Quantised(*quantise_rows_triton(x, factor, width, dtype=dtype, largest=LARGEST, least=LEAST))
    expected = quantise_rows_torch(x, factor, width)
    assert actual.scales.t().is_contiguous()
    assert expected.scales.t().is_contiguous()
    assert torch.equal(actual.scales, expected.scales)
    torch.testing.assert_close(actual.values.to(FP8).float(), expected.values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 16), (64, 64), (130, 48)])
def test_fp8_bytes_are_transposed(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, device=DEVICE).to(FP8)
    assert transposed_triton(values).is_contiguous()
    assert torch.equal(transposed_triton(values).float(), values.t().float())


@pytest.mark.parametrize("shape", [(1.0, None), (0.25, None), (2.0, 3.0)], ids=["plain", "scaled", "softcapped"])
def test_tiles_of_logits(shape: tuple[float, float | None]) -> None:
    results = []
    for tiles in (TritonTiles(*shape, **TRL), TorchTiles(*shape)):
        torch.manual_seed(0)
        tile, targets, factors = torch.randn(7, 1100), torch.randint(1100, (7,)), -torch.rand(7)
        targets[:3] = tile[:3].argmax(-1)
        tile, targets, factors = moved((tile, targets, factors))
        log_probs, entropy = torch.empty(2, 7, device=DEVICE)
        is_top1 = torch.empty(7, dtype=torch.bool, device=DEVICE)
        tiles.differentiate(tile, targets, tiles.fold(tile, targets, log_probs, entropy, is_top1), factors)
        assert is_top1.tolist() == [True] * 3 + [False] * 4
        results.append((log_probs, entropy, tile))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gate", KERNEL_GATES, ids=gate_name)
@BIAS
@DTYPES
def test_gate(gate: Gate, bias: bool, dtype: torch.dtype) -> None:
    h, table, expert, grad, weight = moved(gate_case(dtype, bias=bias, rows=11))
    wide = [None if value is None else value.double() for value in (h, table)]
    exact = [reference_gate(*wide, expert, gate)]
    exact += twin(gate_backward, *wide, expert, gate, grad.double(), weight.double())
    ours = [gate_forward_triton(h, table, expert, gate), *gate_backward_triton(h, table, expert, gate, grad, weight)]
    twins = [twin(gate_forward, h, table, expert, gate), *twin(gate_backward, h, table, expert, gate, grad, weight)]
    floor = 2 * torch.finfo(dtype).eps  # a device's exponential may be off by two units
    for mine, other, value in zip(ours, twins, exact, strict=True):
        assert mine.dtype == other.dtype
        assert norm_of_difference(mine, value) <= max(1.1 * norm_of_difference(other, value), floor)
    h[5] = torch.nan
    for value in (
        gate_forward_triton(h, table, expert, gate),
        *gate_backward_triton(h, table, expert, gate, grad, weight)[:2],
    ):
        assert value.isnan().any(1).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@BIAS
@DTYPES
def test_combine(dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None) -> None:
    ids, weights = routed(7, 3, 5)
    rows, table = torch.randn(21, 40).to(dtype), torch.randn(5, 40).to(dtype) if bias else None
    scale = None if weights_dtype is None else weights.to(weights_dtype)
    rows, inverse, scale, table, ids = moved([rows, routing_plan(ids, 5).inverse, scale, table, ids])
    wide = [None if value is None else value.double() for value in (rows, scale, table)]
    exact = twin(combine, wide[0], inverse, wide[1], bias_eh=wide[2], ids_tk=ids)
    for out in (None, torch.float32):
        options = {"bias_eh": table, "ids_tk": ids, "dtype": out}
        mine, plain = combine_triton(rows, inverse, scale, **options), twin(combine, rows, inverse, scale, **options)
        assert mine.dtype == plain.dtype
        assert norm_of_difference(mine, exact) <= max(1.1 * norm_of_difference(plain, exact), torch.finfo(dtype).eps)


def test_no_rows() -> None:
    h, expert = torch.zeros(0, 32, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert gate_forward_triton(h, None, expert, KERNEL_GATES[0]).shape == (0, 16)
    grads = gate_backward_triton(h, None, expert, KERNEL_GATES[0], h[:, :16], h[:, 0])
    assert [tuple(grad.shape) for grad in grads] == [(0, 32), (0, 16), (0,)]
    assert combine_triton(h, torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)).shape == (0, 32)


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    """A model over several devices: the current one stays the first."""
    h, table, expert, grad, weight = moved(gate_case(torch.float32), "cuda:1")
    arguments = (h, table, expert, KERNEL_GATES[2])
    (ids, weights), rows = moved(routed(19, 3, 5), "cuda:1"), torch.randn(57, 40, device="cuda:1")
    summed = (rows, routing_plan(ids, 5).inverse, weights)
    ours = [gate_forward_triton(*arguments), *gate_backward_triton(*arguments, grad, weight), combine_triton(*summed)]
    twins = [twin(gate_forward, *arguments), *twin(gate_backward, *arguments, grad, weight), twin(combine, *summed)]
    assert all(norm_of_difference(mine.cpu(), other.cpu()) <= 1e-6 for mine, other in zip(ours, twins, strict=True))
    assert torch.cuda.current_device() == 0
