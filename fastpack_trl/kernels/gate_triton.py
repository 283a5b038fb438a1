# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.gate`: bias and gate in one pass over the pre-activation, in fp32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch
from fastpack_trl.kernels.gate_form import Gate, passes_at_bounds

_ROWS = 4
_MAX_COLUMNS = 512


@triton.jit
def _load_halves(
    base, row, first_column, row_inside, inner, interleaved: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    """Load gate and up, (rows, columns) fp32, of rows of 2 * inner elements. Interleaved pairs are read as one run."""
    row = row.to(tl.int64)[:, None] * (2 * inner)
    if interleaved:
        wide = first_column * 2 + tl.arange(0, 2 * columns)[None, :]
        both = tl.load(base + row + wide, mask=row_inside[:, None] & (wide < 2 * inner), other=0.0)
        first, up = tl.split(tl.reshape(both.to(tl.float32), (rows, columns, 2)))
    else:
        column = first_column + tl.arange(0, columns)[None, :]
        mask = row_inside[:, None] & (column < inner)
        first = tl.load(base + row + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(base + row + inner + column, mask=mask, other=0.0).to(tl.float32)
    return first, up


@triton.jit
def _pre_activation(
    h, bias, expert, row, first_column, row_inside, inner,
    has_bias: tl.constexpr, interleaved: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    first, up = _load_halves(h, row, first_column, row_inside, inner, interleaved, rows, columns)
    if has_bias:
        of_row = tl.load(expert + row, mask=row_inside, other=0)
        more, more_up = _load_halves(bias, of_row, first_column, row_inside, inner, interleaved, rows, columns)
        first += more
        up += more_up
    return first, up


@triton.jit
def _forward_kernel(
    h, bias, expert, out, slots, inner, alpha, limit,
    has_bias: tl.constexpr, clamped: tl.constexpr, interleaved: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    row_inside = row < slots
    first_column = tl.program_id(1) * columns
    first, up = _pre_activation(
        h, bias, expert, row, first_column, row_inside, inner, has_bias, interleaved, rows, columns
    )
    if clamped:
        # `where` and not `minimum`: a NaN must stay one.
        first = tl.where(first > limit, limit, first)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        a = (up + 1) * first / (1 + tl.exp(-alpha * first))
    else:
        a = first / (1 + tl.exp(-first)) * up
    column = first_column + tl.arange(0, columns)[None, :]
    place = out + row.to(tl.int64)[:, None] * inner + column
    tl.store(place, a.to(out.dtype.element_ty), mask=row_inside[:, None] & (column < inner))


@triton.jit
def _backward_kernel(
    h, bias, expert, grad_a, more, weight, grad_h, weighted_a, grad_weight, slots, inner, alpha, limit,
    has_more: tl.constexpr, has_bias: tl.constexpr, clamped: tl.constexpr, at_bounds: tl.constexpr,
    interleaved: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    row_inside = row < slots
    scale = tl.load(weight + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    dot = tl.zeros((rows,), dtype=tl.float32)
    for first_column in range(0, inner, columns):
        first, up = _pre_activation(
            h, bias, expert, row, first_column, row_inside, inner, has_bias, interleaved, rows, columns
        )
        column = first_column + tl.arange(0, columns)[None, :]
        mask = row_inside[:, None] & (column < inner)
        place = row.to(tl.int64)[:, None] * inner + column
        grad = tl.load(grad_a + place, mask=mask, other=0.0).to(tl.float32)
        if has_more:
            grad += tl.load(more + place, mask=mask, other=0.0).to(tl.float32)
        if clamped:
            x = tl.where(first > limit, limit, first)
            u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1
            sigmoid = 1 / (1 + tl.exp(-alpha * x))
            glu = x * sigmoid
            a = u * glu
            d_up = grad * scale * glu
            d_first = grad * scale * u * (sigmoid + alpha * glu * (1 - sigmoid))
            if at_bounds:
                d_up = tl.where((up < -limit) | (up > limit), 0.0, d_up)
                d_first = tl.where(first > limit, 0.0, d_first)
            else:
                d_up = tl.where((up <= -limit) | (up >= limit), 0.0, d_up)
                d_first = tl.where(first >= limit, 0.0, d_first)
        else:
            sigmoid = 1 / (1 + tl.exp(-first))
            silu = first * sigmoid
            a = silu * up
            d_up = grad * scale * silu
            d_first = grad * scale * up * (sigmoid + silu * (1 - sigmoid))
        dot += tl.sum(tl.where(mask, grad * a, 0.0), axis=1)
        tl.store(weighted_a + place, (scale * a).to(weighted_a.dtype.element_ty), mask=mask)
        wide_row = row.to(tl.int64)[:, None] * (2 * inner)
        if interleaved:
            wide = first_column * 2 + tl.arange(0, 2 * columns)[None, :]
            both = tl.reshape(tl.join(d_first, d_up), (rows, 2 * columns))
            inside = row_inside[:, None] & (wide < 2 * inner)
            tl.store(grad_h + wide_row + wide, both.to(grad_h.dtype.element_ty), mask=inside)
        else:
            tl.store(grad_h + wide_row + column, d_first.to(grad_h.dtype.element_ty), mask=mask)
            tl.store(grad_h + wide_row + inner + column, d_up.to(grad_h.dtype.element_ty), mask=mask)
    tl.store(grad_weight + row, dot, mask=row_inside)


def gate_forward_triton(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate) -> Tensor:
    """Compute `gate_forward` in one kernel; the gate is one of those with a formula."""
    slots, inner = h_sf.shape[0], h_sf.shape[1] // 2
    out = h_sf.new_empty(slots, inner)
    if slots:
        columns = _columns(inner)
        launch(
            _forward_kernel, (triton.cdiv(slots, _ROWS), triton.cdiv(inner, columns)),
            h_sf.contiguous(), h_sf if bias_ef is None else bias_ef.contiguous(), expert_s, out, slots, inner,
            gate.alpha, gate.limit, has_bias=bias_ef is not None, clamped=gate.kind == "clamped",
            interleaved=gate.interleaved, rows=_ROWS, columns=columns,
        )  # fmt: skip
    return out


def gate_backward_triton(
    h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate, grad_a_si: Tensor, weight_s: Tensor,
    more_si: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `gate_backward` in one kernel."""
    slots, inner = grad_a_si.shape
    grad_h, weighted_a = torch.empty_like(h_sf), torch.empty_like(grad_a_si)
    grad_weight = torch.empty(slots, dtype=torch.float32, device=h_sf.device)
    if slots:
        launch(
            _backward_kernel, (triton.cdiv(slots, _ROWS),),
            h_sf.contiguous(), h_sf if bias_ef is None else bias_ef.contiguous(), expert_s, grad_a_si.contiguous(),
            grad_a_si if more_si is None else more_si.contiguous(), weight_s, grad_h, weighted_a, grad_weight,
            slots, inner, gate.alpha, gate.limit, has_more=more_si is not None, has_bias=bias_ef is not None,
            clamped=gate.kind == "clamped", at_bounds=passes_at_bounds(),
            interleaved=gate.interleaved, rows=_ROWS, columns=_columns(inner),
        )  # fmt: skip
    return grad_h, weighted_a, grad_weight


def _columns(inner: int) -> int:
    return min(_MAX_COLUMNS, triton.next_power_of_2(inner))
