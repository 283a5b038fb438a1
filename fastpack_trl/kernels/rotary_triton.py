# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `fastpack_trl.kernels.rotary`: q and k in one launch, a row of a tile per head of a token."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch
from fastpack_trl.kernels.fused_form import Layout, RotaryForm, empty_like
from fastpack_trl.kernels.norm_triton import num_programs

_TILE, _WARPS = 2048, 4
"""Elements and warps per program."""
_COLUMNS = {"half": 0, "pairs": 1, "first": 2}


@triton.jit
def _load(base, place, there, pairs: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr):
    """Load both elements of each pair, (rows, padded) fp32; neighbours are read as one run."""
    if kind == 1:
        column = tl.arange(0, 2 * padded)[None, :]
        both = tl.load(base + place + column, mask=there[:, None] & (column < 2 * pairs), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (rows, padded, 2)))
    else:
        column = tl.arange(0, padded)[None, :]
        inside = there[:, None] & (column < pairs)
        a = tl.load(base + place + column, mask=inside, other=0.0).to(tl.float32)
        b = a
        if kind == 0:
            b = tl.load(base + place + pairs + column, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store(base, place, there, a, b, pairs: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr):
    if kind == 1:
        column = tl.arange(0, 2 * padded)[None, :]
        both = tl.reshape(tl.join(a, b), (rows, 2 * padded)).to(base.dtype.element_ty)
        tl.store(base + place + column, both, mask=there[:, None] & (column < 2 * pairs))
    else:
        column = tl.arange(0, padded)[None, :]
        inside = there[:, None] & (column < pairs)
        tl.store(base + place + column, a.to(base.dtype.element_ty), mask=inside)
        tl.store(base + place + pairs + column, b.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x, out, other, cos, sin, weight, rstd, grad_weight, program, programs, num_rows, tokens, cos_batch, cos_token,
    heads, x_batch, x_head, x_token, out_batch, out_head, out_token, other_batch, other_head, other_token, eps,
    pairs: tl.constexpr, width: tl.constexpr, reads: tl.constexpr, writes: tl.constexpr, columns: tl.constexpr,
    has_norm: tl.constexpr, offset: tl.constexpr, back: tl.constexpr, of_weight: tl.constexpr,
    rows: tl.constexpr, padded: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, 1)
    if has_norm:  # the weight has the columns of the norm's input: in backward, that is where the gradient goes
        w_a, w_b = _load(weight, one[:, None], one == 0, pairs, writes if back else reads, 1, padded)
        w_a, w_b = w_a + offset, w_b + offset
    if of_weight:
        sum_a = tl.zeros((rows, padded), dtype=tl.float32)
        sum_b = tl.zeros((rows, padded), dtype=tl.float32)
    # As in `norm_triton`: one block per program, unless sums over rows are made.
    for block in range(program, tl.cdiv(num_rows, rows), programs):
        row = block * rows + tl.arange(0, rows)
        there = row < num_rows
        head, batch = (row % heads).to(tl.int64), (row // (heads * tokens)).to(tl.int64)
        token = ((row // heads) % tokens).to(tl.int64)
        start = (batch * x_batch + token * x_token + head * x_head)[:, None]
        end = (batch * out_batch + token * out_token + head * out_head)[:, None]
        angle = (batch * cos_batch + token * cos_token)[:, None]
        a, b = _load(x, start, there, pairs, reads, rows, padded)
        c_a, c_b = _load(cos, angle, there, pairs, columns, rows, padded)
        s_a, s_b = _load(sin, angle, there, pairs, columns, rows, padded)
        if rest:
            tail = 2 * pairs + tl.arange(0, rest)[None, :]
            in_tail = there[:, None] & (tail < width)
            passed = tl.load(x + start + tail, mask=in_tail, other=0.0)
            tl.store(out + end + tail, passed.to(out.dtype.element_ty), mask=in_tail)
        if has_norm and not back:
            inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / width + eps)
            tl.store(rstd + row, inverse, mask=there)
            a, b = a * inverse[:, None] * w_a, b * inverse[:, None] * w_b
        if back:
            a, b = a * c_a + b * s_b, b * c_b - a * s_a
        else:
            a, b = a * c_a - b * s_a, b * c_b + a * s_b
        if has_norm and back:
            inverse = tl.load(rstd + row, mask=there, other=0.0)[:, None]
            kept = (batch * other_batch + token * other_token + head * other_head)[:, None]
            n_a, n_b = _load(other, kept, there, pairs, writes, rows, padded)
            n_a, n_b = n_a * inverse, n_b * inverse
            if of_weight:
                sum_a += a * n_a
                sum_b += b * n_b
            a, b = a * w_a, b * w_b
            dot = (tl.sum(a * n_a + b * n_b, axis=1) / width)[:, None]
            a, b = (a - n_a * dot) * inverse, (b - n_b * dot) * inverse
        _store(out, end, there, a, b, pairs, writes, rows, padded)
    if of_weight:
        a, b = tl.sum(sum_a, axis=0)[None, :], tl.sum(sum_b, axis=0)[None, :]
        _store(grad_weight + program * width, one[:, None], one == 0, a, b, pairs, writes, 1, padded)


@triton.jit(do_not_specialize=["q_programs", "k_programs", "q_rows", "k_rows", "tokens"])
def _kernel(
    q, q_out, q_other, q_weight, q_rstd, q_sums, q_programs, q_rows, q_heads, q_b, q_h, q_t, q_ob, q_oh, q_ot,
    q_xb, q_xh, q_xt,
    k, k_out, k_other, k_weight, k_rstd, k_sums, k_programs, k_rows, k_heads, k_b, k_h, k_t, k_ob, k_oh, k_ot,
    k_xb, k_xh, k_xt,
    cos, sin, tokens, cos_batch, cos_token, eps,
    pairs: tl.constexpr, width: tl.constexpr, reads: tl.constexpr, writes: tl.constexpr, columns: tl.constexpr,
    has_norm: tl.constexpr, offset: tl.constexpr, back: tl.constexpr, of_weight: tl.constexpr,
    rows: tl.constexpr, padded: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < q_programs:
        _rotate(
            q, q_out, q_other, cos, sin, q_weight, q_rstd, q_sums, program, q_programs, q_rows, tokens, cos_batch,
            cos_token, q_heads, q_b, q_h, q_t, q_ob, q_oh, q_ot, q_xb, q_xh, q_xt, eps, pairs, width, reads, writes,
            columns, has_norm, offset, back, of_weight, rows, padded, rest,
        )  # fmt: skip
    else:
        _rotate(
            k, k_out, k_other, cos, sin, k_weight, k_rstd, k_sums, program - q_programs, k_programs, k_rows, tokens,
            cos_batch, cos_token, k_heads, k_b, k_h, k_t, k_ob, k_oh, k_ot, k_xb, k_xh, k_xt, eps, pairs, width,
            reads, writes, columns, has_norm, offset, back, of_weight, rows, padded, rest,
        )  # fmt: skip


def rotary_forward_triton(
    xs: tuple[Tensor, Tensor], weights: tuple[Any, Any], cos: Tensor, sin: Tensor, form: RotaryForm, norm: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute `rotary_forward` in one kernel."""
    xs = _inner(*xs)
    outs = [form.empty(x, cos) for x in xs]
    has_norm = norm is not None
    rstds = [torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device) for x in xs if has_norm]
    _launch(xs, outs, xs, weights, rstds or outs, None, cos, sin, form, norm)
    return outs, rstds


def rotary_backward_triton(
    grads: tuple[Tensor, ...], layouts: list[Layout], saved: tuple[Tensor, ...], weights: tuple[Any, Any],
    cos: Tensor, sin: Tensor, form: RotaryForm, norm: Any, *, of_weights: bool,
) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """Compute `rotary_backward` in one kernel; sums for the weights need a second one."""
    grads = _inner(*grads)
    outs = [empty_like(grad, *layout) for grad, layout in zip(grads, layouts, strict=True)]
    sums = None
    if of_weights:
        shape = 2, num_programs(cos.device), grads[0].shape[-1]
        sums = torch.empty(shape, dtype=torch.float32, device=cos.device)
    others = _inner(*saved[:2]) or grads
    _launch(grads, outs, others, weights, saved[2:] or outs, sums, cos, sin, form, norm, back=True)
    return outs, [None, None] if sums is None else list(sums.sum(1))


def _inner(*xs: Tensor) -> Any:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in xs)


def _launch(
    xs: Any, outs: Any, others: Any, weights: Any, rstds: Any, sums: Any, cos: Tensor, sin: Tensor, form: RotaryForm,
    norm: Any, *, back: bool = False,
) -> None:  # fmt: skip
    pairs, width, tokens = form.num_pairs(cos), xs[0].shape[-1], xs[0].shape[2]
    rows, padded, rest = _tile(pairs, width)
    cos, sin = cos.contiguous(), sin.contiguous()
    sides, programs = list[Any](), 0
    for index, (x, out, other) in enumerate(zip(xs, outs, others, strict=True)):
        num_rows = x.numel() // width
        count = -(-num_rows // rows) if sums is None else sums.shape[1]
        programs += count
        sides += [
            x, out, other, x if weights[index] is None else weights[index].contiguous(), rstds[index],
            out if sums is None else sums[index], count, num_rows, x.shape[1],
            *x.stride()[:3], *out.stride()[:3], *other.stride()[:3],
        ]  # fmt: skip
    if not tokens:
        if sums is not None:
            sums.zero_()
        return
    styles = (form.writes, form.reads) if back else (form.reads, form.writes)
    launch(
        _kernel, (programs,),
        *sides, cos, sin, tokens, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        0.0 if norm is None else norm.eps, pairs=pairs, width=width, reads=_COLUMNS[styles[0]],
        writes=_COLUMNS[styles[1]], columns=_COLUMNS[form.columns], has_norm=norm is not None,
        offset=0 if norm is None else norm.offset, back=back, of_weight=sums is not None, rows=rows, padded=padded,
        rest=rest, num_warps=_WARPS,
    )  # fmt: skip


@cache
def _tile(pairs: int, width: int) -> tuple[int, int, int]:
    """Return rows per block, and columns for one element of the pairs and for the rest of a head."""
    padded = triton.next_power_of_2(pairs)
    rest = triton.next_power_of_2(width - 2 * pairs) if width > 2 * pairs else 0
    return max(1, _TILE // triton.next_power_of_2(2 * padded + rest)), padded, rest
