"""The Triton kernel of 4-bit weights beside its torch twin: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type
from quantised_material import dequantise_4bit_torch, packed_weight

from fastpack_trl.kernels.dequantise_triton import dequantise_4bit_triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("shape", [(1, 4), (3, 65), (64, 64), (33 if DEVICE == "cuda" else 5, 1037)])
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_kernel_equals_the_twin_and_bitsandbytes(
    dtype: torch.dtype, kind: str, nested: bool, blocksize: int, shape: tuple[int, int]
) -> None:
    packed, state = packed_weight(shape, kind, nested=nested, blocksize=blocksize, dtype=dtype, device=DEVICE)
    code = get_4bit_type(kind, device=DEVICE)
    found = dequantise_4bit_triton(packed, state, code)
    assert found.dtype == dtype
    assert found.shape == shape
    if DEVICE == "cuda":  # that of the CPU is measured against the twin in `test_dequantise.py`
        assert torch.equal(found, dequantize_4bit(packed, state))
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts off what bf16 has no bits for
        state.dtype = torch.float32
        assert torch.equal(
            found.view(torch.int16).int(), dequantise_4bit_torch(packed, state, code).view(torch.int32) >> 16
        )
    else:
        assert torch.equal(found, dequantise_4bit_torch(packed, state, code))
