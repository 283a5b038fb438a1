# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.short_conv`: one forward, two backward, instead of one per column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import on_device_of

_TOKENS, _CHANNELS = 64, 64


@triton.jit
def _earlier(x, token, channel, position, back, tokens, channels, step, stride):
    """Load the values of the tokens `back` before, 0 for those of another document."""
    seen = (token < tokens) & (position >= back)
    place = x + (token - back).to(tl.int64)[:, None] * step + channel[None, :] * stride
    return tl.load(place, mask=seen[:, None] & (channel < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _sum(
    x, weight, bias, token, channel, position, tokens, channels, step, stride, has_bias: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((rows, columns), dtype=tl.float32)
    if has_bias:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(width):
        values = _earlier(x, token, channel, position, back, tokens, channels, step, stride)
        scale = tl.load(weight + channel * width + width - 1 - back, mask=channel < channels, other=0.0)
        total += values * scale.to(tl.float32)[None, :]
    return total


@triton.jit
def _forward_kernel(
    x, weight, bias, positions, out, tokens, channels, step, stride, has_bias: tl.constexpr, silu: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    total = _sum(
        x, weight, bias, token, channel, position, tokens, channels, step, stride, has_bias, width, rows, columns
    )
    if silu:
        total = total / (1 + tl.exp(-total))
    place = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (channel < channels)[None, :])


@triton.jit
def _inner_kernel(
    grad, x, weight, bias, positions, inner, parts, tokens, channels, step, stride, grad_step, grad_stride,
    has_bias: tl.constexpr, silu: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the sum, and of weight and bias what these tokens add."""
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    position = tl.load(positions + token, mask=token < tokens, other=0)
    place = grad + token.to(tl.int64)[:, None] * grad_step + channel[None, :] * grad_stride
    given = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if silu:
        total = _sum(
            x, weight, bias, token, channel, position, tokens, channels, step, stride, has_bias, width, rows, columns
        )
        sigmoid = 1 / (1 + tl.exp(-total))
        given = given * sigmoid * (1 + total * (1 - sigmoid))
    tl.store(inner + token.to(tl.int64)[:, None] * channels + channel[None, :], given, mask=inside)
    part = parts + tl.program_id(0).to(tl.int64) * (width + 1) * channels + channel
    for back in tl.static_range(width):
        values = _earlier(x, token, channel, position, back, tokens, channels, step, stride)
        added = tl.sum(tl.where(inside, given * values, 0.0), axis=0)
        tl.store(part + (width - 1 - back) * channels, added, mask=channel < channels)
    tl.store(part + width * channels, tl.sum(tl.where(inside, given, 0.0), axis=0), mask=channel < channels)


@triton.jit
def _input_kernel(
    inner, weight, positions, to_x, tokens, channels, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for back in tl.static_range(width):
        later = token + back
        position = tl.load(positions + later, mask=later < tokens, other=-1)
        mask = (position >= back)[:, None] & (channel < channels)[None, :]
        values = tl.load(inner + later.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
        scale = tl.load(weight + channel * width + width - 1 - back, mask=channel < channels, other=0.0)
        total += values * scale.to(tl.float32)[None, :]
    place = to_x + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(place, total.to(to_x.dtype.element_ty), mask=(token < tokens)[:, None] & (channel < channels)[None, :])


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], _TOKENS), triton.cdiv(x.shape[1], _CHANNELS)


def short_conv_triton(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """Compute `short_conv` in one kernel."""
    out = x.new_empty(x.shape)
    with on_device_of(x):
        _forward_kernel[_grid(x)](
            x, weight.contiguous(), x if bias is None else bias, positions, out, *x.shape, *x.stride(),
            has_bias=bias is not None, silu=silu, width=weight.shape[1], rows=_TOKENS, columns=_CHANNELS,
        )  # fmt: skip
    return out


def short_conv_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `short_conv_backward` in two kernels and a sum."""
    width, grid, scales = weight.shape[1], _grid(x), weight.contiguous()
    inner = x.new_empty(x.shape, dtype=torch.float32)
    parts = x.new_empty(grid[0], width + 1, x.shape[1], dtype=torch.float32)
    to_x = x.new_empty(x.shape)
    with on_device_of(x):
        _inner_kernel[grid](
            grad, x, scales, x if bias is None else bias, positions, inner, parts, *x.shape, *x.stride(),
            *grad.stride(), has_bias=bias is not None, silu=silu, width=width, rows=_TOKENS, columns=_CHANNELS,
        )  # fmt: skip
        _input_kernel[grid](inner, scales, positions, to_x, *x.shape, width=width, rows=_TOKENS, columns=_CHANNELS)
    sums = parts.sum(0)
    to_bias = sums[width].to(weight.dtype if bias is None else bias.dtype, copy=True)
    return to_x, sums[:width].T.to(weight.dtype, memory_format=torch.contiguous_format, copy=True), to_bias
