# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.gated`."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch
from fastpack_trl.kernels.fused_form import GatedForm, rows_of

_ROWS, _MAX_COLUMNS, _WARPS = 4, 512, 4


@triton.jit
def _activate(x, alpha, act: tl.constexpr):
    """Return the activation of x and its derivative. `where` and not `maximum`: a NaN must stay one."""
    if act == "relu":
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)
    elif act == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive, 2 * positive
    elif act == "gelu":
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif act == "gelu_tanh":
        share = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        return x * share, share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        share = 1 / (1 + tl.exp(-alpha * x))
        return x * share, share + alpha * x * share * (1 - share)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    gate, up, grad, out, out_up, num_rows, width, gate_stride, up_stride, grad_stride, out_stride, out_up_stride,
    alpha, act: tl.constexpr, back: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    row = row[:, None]
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate(x, alpha, act)
    if back:
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + column, (g * slope * y).to(out.dtype.element_ty), mask=inside)
        tl.store(out_up + row * out_up_stride + column, (g * value).to(out_up.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row * out_stride + column, (value * y).to(out.dtype.element_ty), mask=inside)


def gated_forward_triton(gate: Tensor, up: Tensor, form: GatedForm) -> Tensor:
    """Compute `gated_forward` in one kernel."""
    out = gate.new_empty(gate.shape)
    _launch((gate, up, gate), (out, out), form, back=False)
    return out


def gated_backward_triton(
    gate: Tensor, up: Tensor, grad: Tensor, into: tuple[Tensor, Tensor], form: GatedForm
) -> tuple[Tensor, Tensor]:
    """Compute `gated_backward` in one kernel."""
    _launch((gate, up, grad), into, form, back=True)
    return into


def _launch(given: tuple[Tensor, ...], outs: tuple[Tensor, ...], form: GatedForm, *, back: bool) -> None:
    # Results are dense, or halves of a dense tensor: their rows are views.
    width = given[0].shape[-1]
    num_rows, (rows, strides) = (
        given[0].numel() // width,
        zip(*(rows_of(x, None) for x in (*given, *outs)), strict=True),
    )
    columns = _columns(width)
    if num_rows:
        launch(
            _kernel, (-(-num_rows // _ROWS), -(-width // columns)), *rows, num_rows, width, *strides, form.alpha,
            act=form.act, back=back, rows=_ROWS, columns=columns, num_warps=_WARPS,
        )  # fmt: skip


@cache
def _columns(width: int) -> int:
    return min(_MAX_COLUMNS, triton.next_power_of_2(width))
