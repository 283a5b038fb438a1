"""The Triton kernels of FP8 beside their torch twins: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os

import pytest
import torch
from fp8_values import KINDS, matrix

from fastpack_trl.kernels.fp8 import FP8, LARGEST, LEAST, Quantised, quantise_rows_torch
from fastpack_trl.kernels.fp8_triton import quantise_rows_triton, transposed_triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize(("shape", "width"), [((1, 16), None), ((5, 48), None), ((3, 256), 128), ((70, 384), 128)])
@pytest.mark.parametrize("folded", [False, True], ids=["plain", "folded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_pass_gives_the_bits_of_the_twin(
    dtype: torch.dtype, kind: str, folded: bool, shape: tuple[int, int], width: int | None
) -> None:
    if (DEVICE, kind, dtype) == ("cpu", "subnormal", torch.bfloat16):
        pytest.skip("the interpreter reads such values as zeros")
    x = matrix(kind, shape, dtype).to(DEVICE)
    factor = torch.rand(shape[1], device=DEVICE) + 0.5 if folded else None
    # The interpreter loses carries and NaN where it rounds to FP8: there, torch rounds what the kernel has made.
    dtype = FP8 if DEVICE == "cuda" else torch.float32
    found = Quantised(*quantise_rows_triton(x, factor, width, dtype=dtype, largest=LARGEST, least=LEAST))
    expected = quantise_rows_torch(x, factor, width)
    values = found.values.to(FP8)
    assert found.scales.t().is_contiguous()
    assert expected.scales.t().is_contiguous()
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(values.isnan(), expected.values.isnan())
    assert torch.equal(values.float().nan_to_num(), expected.values.float().nan_to_num())


@pytest.mark.parametrize("shape", [(1, 16), (64, 64), (130, 48)])
def test_bytes_are_transposed(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, device=DEVICE).to(FP8)
    found = transposed_triton(values)
    assert found.is_contiguous()
    assert torch.equal(found.float(), values.t().float())
