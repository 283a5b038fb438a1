# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.norm`: whole rows in registers, several per program if they are narrow."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch
from fastpack_trl.kernels.fused_form import NormForm, Statistics, empty_like, memory_order, rows_of

_TILE, _PER_WARP = 2048, 512
"""Elements per program, and per warp: 16 per thread, two loads of 16 bytes each."""


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x, y, weight, bias, total, out, rstd, mean, num_rows, width, x_stride, y_stride, eps,
    has_y: tl.constexpr, has_weight: tl.constexpr, has_bias: tl.constexpr, centers: tl.constexpr,
    offset: tl.constexpr, rounds: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there, column = row < num_rows, tl.arange(0, columns)[None, :]
    inside = there[:, None] & (column < width)
    place = row[:, None] * width + column
    value = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if has_y:
        value += tl.load(y + row[:, None] * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if centers:
        average = tl.sum(value, axis=1) / width
        tl.store(mean + row, average, mask=there)
        value = tl.where(inside, value - average[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(rstd + row, inverse, mask=there)
    value *= inverse[:, None]
    if rounds:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if has_weight:
        value *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    if has_bias:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    x, weight, rstd, mean, grad, other, grad_x, grad_weight, grad_bias,
    num_rows, width, x_stride, grad_stride, other_stride,
    has_other: tl.constexpr, has_weight: tl.constexpr, centers: tl.constexpr, offset: tl.constexpr,
    of_weight: tl.constexpr, of_bias: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, columns)[None, :]
    if has_weight:
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    if of_weight:
        weight_sum = tl.zeros((rows, columns), dtype=tl.float32)
    if of_bias:
        bias_sum = tl.zeros((rows, columns), dtype=tl.float32)
    # One block per program, unless sums over rows are made: then few programs take many blocks each.
    for block in range(tl.program_id(0), tl.cdiv(num_rows, rows), tl.num_programs(0)):
        row = (block * rows + tl.arange(0, rows)).to(tl.int64)
        there = row < num_rows
        inside = there[:, None] & (column < width)
        normal = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=there, other=0.0)[:, None]
        if centers:
            normal = tl.where(inside, normal - tl.load(mean + row, mask=there, other=0.0)[:, None], 0.0)
        normal *= inverse
        if of_weight:
            weight_sum += g * normal
        if of_bias:
            bias_sum += g
        if has_weight:
            g *= scale
        result = g - normal * (tl.sum(g * normal, axis=1) / width)[:, None]
        if centers:
            result -= (tl.sum(g, axis=1) / width)[:, None]
        result *= inverse
        if has_other:
            result += tl.load(other + row[:, None] * other_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row[:, None] * width + column, result.to(grad_x.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * width + tl.arange(0, columns)
    if of_weight:
        tl.store(grad_weight + place, tl.sum(weight_sum, axis=0), mask=tl.arange(0, columns) < width)
    if of_bias:
        tl.store(grad_bias + place, tl.sum(bias_sum, axis=0), mask=tl.arange(0, columns) < width)


def norm_forward_triton(
    x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: NormForm
) -> tuple[Tensor, Tensor, Statistics]:
    """Compute `norm_forward` in one kernel."""
    order, width = memory_order(x), x.shape[-1]
    rows, stride = rows_of(x, order)
    others, other_stride = (rows, stride) if y is None else rows_of(y, order)
    out = empty_like(x, form.out_dtype(x, weight), order)
    total = x if y is None else empty_like(x, x.dtype, order)
    num_rows = x.numel() // width
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if form.centers else None
    if num_rows:
        per_program, columns, warps = _shape(width)
        launch(
            _forward_kernel, (-(-num_rows // per_program),),
            rows, others, rows if weight is None else weight.contiguous(), rows if bias is None else bias.contiguous(),
            total, out, rstd, rstd if mean is None else mean, num_rows, width, stride, other_stride, form.eps,
            has_y=y is not None, has_weight=weight is not None, has_bias=bias is not None, centers=form.centers,
            offset=form.offset, rounds=form.rounds, rows=per_program, columns=columns, num_warps=warps,
        )  # fmt: skip
    return total, out, Statistics(rstd, mean)


def norm_backward_triton(
    x: Tensor, weight: Tensor | None, statistics: Statistics, grad: Tensor, grad_x: Tensor | None, form: NormForm,
    *, of_weight: bool, of_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute `norm_backward` in one kernel; the sums over rows need a second one."""
    order, width = memory_order(x), x.shape[-1]
    (rows, stride), (grads, grad_stride) = rows_of(x, order), rows_of(grad, order)
    others, other_stride = (rows, stride) if grad_x is None else rows_of(grad_x, order)
    out, (rstd, mean) = empty_like(x, x.dtype, order), statistics
    num_rows = x.numel() // width
    per_program, columns, warps = _shape(width)
    programs, sums = -(-num_rows // per_program), None
    if of_weight or of_bias:
        programs = min(programs, num_programs(x.device))
        sums = torch.empty(of_weight + of_bias, programs, width, dtype=torch.float32, device=x.device)
    if num_rows:
        launch(
            _backward_kernel, (programs,),
            rows, rows if weight is None else weight.contiguous(), rstd, rstd if mean is None else mean, grads,
            others, out, sums[0] if sums is not None and of_weight else rstd,
            sums[-1] if sums is not None and of_bias else rstd,
            num_rows, width, stride, grad_stride, other_stride,
            has_other=grad_x is not None, has_weight=weight is not None, centers=form.centers, offset=form.offset,
            of_weight=of_weight, of_bias=of_bias, rows=per_program, columns=columns, num_warps=warps,
        )  # fmt: skip
    if sums is None:
        return out, None, None
    total = sums.sum(1)
    return out, total[0] if of_weight else None, total[-1] if of_bias else None


@cache
def num_programs(device: torch.device) -> int:
    """Return how many programs sum over rows: two per multiprocessor, a fixed number, so that sums repeat."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def _shape(width: int) -> tuple[int, int, int]:
    """Return rows per program, columns and warps."""
    columns = triton.next_power_of_2(width)
    return max(1, _TILE // columns), columns, min(32, max(4, columns // _PER_WARP))
