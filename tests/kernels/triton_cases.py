"""Each Triton kernel vs. its torch twin: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lora_material import KINDS, dequantize_4bit_torch, matrix, packed_weight
from moe_material import KERNEL_GATES, assert_as_near, autograd_gate, combine_case, gate_case, gate_name
from trl.kernels import chunked_logprob

from fastpack_trl.kernels.combine import combine
from fastpack_trl.kernels.combine_triton import combine_triton
from fastpack_trl.kernels.dequantize_triton import dequantize_4bit_triton
from fastpack_trl.kernels.fp8 import FP8, LARGEST, LEAST, Quantized, quantize_rows_torch
from fastpack_trl.kernels.fp8_triton import quantize_rows_triton, transposed_triton
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.gate_triton import gate_backward_triton, gate_forward_triton
from fastpack_trl.kernels.head_tiles import TorchTiles, TritonTiles

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])


def moved(values: Any, device: str = DEVICE) -> list[Any]:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def twin(function: Any, *values: Any, **named: Any) -> list[Any]:
    """Compute in plain torch: on the CPU, where no kernel runs."""
    result = function(*moved(values, "cpu"), **dict(zip(named, moved(named.values(), "cpu"), strict=True)))
    return moved([result] if isinstance(result, torch.Tensor) else result)


@pytest.mark.parametrize("shape", [(1, 4), (3, 65), (64, 64), (33 if DEVICE == "cuda" else 5, 1037)])
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"] if DEVICE == "cuda" else ["nf4"])  # they differ in the table `code`
@DTYPES
def test_4bit_weights(dtype: torch.dtype, kind: str, nested: bool, blocksize: int, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = packed_weight(shape, kind, nested=nested, blocksize=blocksize, dtype=dtype, device=DEVICE)
    code = functional.get_4bit_type(kind, device=DEVICE)
    dense, expected = dequantize_4bit_triton(packed, state, code), dequantize_4bit_torch(packed, state, code)
    assert (dense.dtype, dense.shape) == (dtype, shape)
    if DEVICE == "cuda":  # that of the CPU is compared with the twin in `test_dequantize.py`
        assert torch.equal(dense, functional.dequantize_4bit(packed, state))
    elif dtype == torch.bfloat16:  # the interpreter cuts off what bf16 has no bits for
        state.dtype = torch.float32
        bits = dequantize_4bit_torch(packed, state, code).view(torch.int32) >> 16
        dense, expected = dense.view(torch.int16).int(), bits
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 384)])
@pytest.mark.parametrize("folded", [False, True], ids=["plain", "folded"])
@pytest.mark.parametrize("kind", KINDS)
@DTYPES
def test_fp8_rows(dtype: torch.dtype, kind: str, folded: bool, shape: tuple[int, int]) -> None:
    if (DEVICE, kind, dtype) == ("cpu", "subnormal", torch.bfloat16):
        pytest.skip("the interpreter reads such values as zeros")
    x = matrix(kind, shape, dtype).to(DEVICE)
    factor = torch.rand(shape[1], device=DEVICE) + 0.5 if folded else None
    # The interpreter loses carries and NaN when it rounds to FP8: there, torch rounds what the kernel has made.
    dtype = FP8 if DEVICE == "cuda" else torch.float32
    actual = Quantized(*quantize_rows_triton(x, factor, dtype=dtype, largest=LARGEST, least=LEAST))
    expected = quantize_rows_torch(x, factor)
    assert torch.equal(actual.scales, expected.scales)
    torch.testing.assert_close(actual.values.to(FP8).float(), expected.values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 256), (70, 384)])
def test_transposed_bytes(shape: tuple[int, int]) -> None:
    values = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    transposed = transposed_triton(values.view(FP8))
    assert transposed.is_contiguous()
    assert torch.equal(transposed.view(torch.uint8), values.t())


@pytest.mark.parametrize("shape", [(1.0, None), (0.25, None), (2.0, 3.0)], ids=["plain", "scaled", "softcapped"])
def test_tiles_of_logits(shape: tuple[float, float | None]) -> None:
    results, trl = [], chunked_logprob
    kernels = {"forward": trl._forward_kernel, "backward": trl._backward_kernel, "block_size": trl._BLOCK_SIZE}
    for tiles in (TritonTiles(*shape, **kernels), TorchTiles(*shape)):
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
@pytest.mark.parametrize("more_of_grad", [False, True], ids=["whole", "two addends"])
def test_gate(gate: Gate, bias: bool, dtype: torch.dtype, more_of_grad: bool) -> None:
    h, table, expert, grad, weight = case = moved(gate_case(dtype, bias=bias, rows=11))
    # Exact in two addends, so that the case's gradient stays their sum.
    more = grad / 2 if more_of_grad else None
    grad = grad if more is None else more.clone()

    def kernels() -> list[Any]:
        first = gate_forward_triton(h, table, expert, gate)
        return [first, *gate_backward_triton(h, table, expert, gate, grad, weight, more)]

    twins = twin(gate_forward, h, table, expert, gate) + twin(gate_backward, h, table, expert, gate, grad, weight, more)
    mine = kernels()
    assert [value.dtype for value in mine] == [value.dtype for value in twins]
    exact = autograd_gate(case, gate, torch.float64)
    assert_as_near(mine, twins, exact, 2 * torch.finfo(dtype).eps)  # exponentials differ by two units
    h[5] = torch.nan
    assert [value.isnan().any(1).nonzero().tolist() for value in kernels()[:3]] == [[[5]]] * 3
    h, grad, weight, expert, more = h[:0], grad[:0], weight[:0], expert[:0], None
    assert [tuple(value.shape) for value in kernels()] == [(0, 16), (0, 32), (0, 16), (0,)]


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@BIAS
@DTYPES
def test_combine(dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None) -> None:
    arguments, keywords, exact = combine_case(dtype, bias, weights_dtype, tokens=7)
    rows, inverse, scale = moved(arguments)
    for out in (None, torch.float32):
        options = dict(zip([*keywords, "dtype"], [*moved(keywords.values()), out], strict=True))
        mine, (plain,) = combine_triton(rows, inverse, scale, **options), twin(combine, *arguments, **options)
        assert mine.dtype == plain.dtype
        assert_as_near([mine], [plain], [exact.to(DEVICE)], torch.finfo(dtype).eps)
        halves = combine_triton(rows / 2, inverse, scale, more_sh=rows / 2, **options)
        assert torch.equal(halves, mine)
        both = twin(combine, rows / 2, inverse, scale, more_sh=rows / 2, **options)
        assert_as_near(both, [plain], [exact.to(DEVICE)], 1e-7)
    assert combine_triton(rows, inverse[:0]).shape == (0, 40)


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    """A model over several devices: the current one stays the first."""
    h, table, expert, grad, weight = moved(gate_case(torch.float32), "cuda:1")
    gated, summed = (h, table, expert, KERNEL_GATES[2]), combine_case(torch.float32, True, torch.float32)[0]
    ours = [gate_forward_triton(*gated), *gate_backward_triton(*gated, grad, weight)]
    ours.append(combine_triton(*moved(summed, "cuda:1")))
    twins = twin(gate_forward, *gated) + twin(gate_backward, *gated, grad, weight) + twin(combine, *summed)
    for mine, other in zip(moved(ours, "cpu"), moved(twins, "cpu"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert torch.cuda.current_device() == 0
