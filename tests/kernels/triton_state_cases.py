"""The Triton kernels of recurrent layers beside their torch twins: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from moe_material import norm_of_difference
from torch import Tensor

from fastpack_trl.kernels.inverse import chunk_inverse
from fastpack_trl.kernels.inverse_triton import chunk_inverse_triton
from fastpack_trl.kernels.short_conv import short_conv, short_conv_backward
from fastpack_trl.kernels.short_conv_triton import short_conv_backward_triton, short_conv_triton
from fastpack_trl.kernels.state_pass import state_pass
from fastpack_trl.kernels.state_pass_triton import state_pass_triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def material(key: int, value: int, channels: bool, chunks: int = 5, heads: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((64, value), (64, key), (64, key), (key if channels else 1, 1), (key, value))
    base, left, right, through, added = (torch.randn(chunks, heads, *shape) for shape in shapes)
    return [base, left / key, right / 8, through.sigmoid(), added]


def in_double(parts: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return state_pass(*(part.cpu().double() for part in parts), **options)


@pytest.mark.parametrize(("key", "value"), [(128, 128), (96, 192), (8, 8), (40, 33)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_the_pass_equals_a_product_per_chunk(key: int, value: int, reverse: bool, channels: bool) -> None:
    parts = material(key, value, channels)[: None if reverse else -1]
    exact, plain = in_double(parts, reverse=reverse), state_pass(*parts, reverse=reverse)
    given = [part.to(DEVICE) for part in parts]
    found = state_pass_triton(*given[:4], given[4] if reverse else None, reverse=reverse, tf32=False)
    for mine, other, right in zip(found, plain, exact, strict=True):
        assert norm_of_difference(mine.cpu(), right) <= 2 * norm_of_difference(other, right) + 1e-7


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_the_inverse_equals_the_solvers(alike: float) -> None:
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(3, 2, 64, 16) + 10 * alike, dim=-1)
    lower = (keys @ keys.mT).tril(-1)
    exact = chunk_inverse(lower.double())
    found = chunk_inverse_triton(lower.to(DEVICE)).cpu()
    assert norm_of_difference(found, exact) <= 4 * norm_of_difference(chunk_inverse(lower), exact) + 1e-7
    assert not found.triu(1).any()


@pytest.mark.skipif(DEVICE == "cpu", reason="rounds on tensor cores alone")
def test_tf32_is_off_by_its_rounding() -> None:
    parts = material(128, 128, False)
    found = state_pass_triton(*(part.to(DEVICE) for part in parts), reverse=True, tf32=True)
    for mine, right in zip(found, in_double(parts, reverse=True), strict=True):
        assert 1e-6 < norm_of_difference(mine.cpu(), right) <= 2e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="which path a device takes")
def test_a_device_takes_the_kernel_for_fp32_alone() -> None:
    parts = [part.to(DEVICE) for part in material(128, 128, False)]
    found = state_pass(*parts, tf32=False)
    wide = state_pass(*(part.double() for part in parts))
    assert all(norm_of_difference(mine, right) <= 1e-6 for mine, right in zip(found, wide, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "silu", "width"), [(True, True, 4), (False, True, 4), (False, False, 7)])
def test_the_convolution_and_its_gradients(dtype: torch.dtype, bias: bool, silu: bool, width: int) -> None:
    torch.manual_seed(0)
    lengths = (70, 1, 3, 61, 2)
    positions = torch.cat([torch.arange(length) for length in lengths])
    x, grad = (torch.randn(sum(lengths), 90).to(dtype)[:, 5:75] for _ in range(2))  # parts of wider rows
    weight, offset = torch.randn(70, width).to(dtype), torch.randn(70).to(dtype) if bias else None
    exact_of = (x.double(), weight.double(), None if offset is None else offset.double(), positions, silu)
    exact = (short_conv(*exact_of), *short_conv_backward(grad.double(), *exact_of))
    twins = (short_conv(x, weight, offset, positions, silu),
             *short_conv_backward(grad, x, weight, offset, positions, silu))  # fmt: skip
    given = [part if part is None else part.to(DEVICE) for part in (x, weight, offset, positions)]
    found = (short_conv_triton(*given, silu), *short_conv_backward_triton(grad.to(DEVICE), *given, silu))
    for mine, other, right in zip(found, twins, exact, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        floor = 2 * torch.finfo(dtype).eps
        assert norm_of_difference(mine.cpu(), right) <= max(1.1 * norm_of_difference(other, right), floor)
