"""Rotation of queries and keys by position, with their norm per head before it if there is one.

Inputs are views (batch, heads, tokens, dim) of any memory; results keep the order of the memory, so that the transposes
of attention copy nothing. Backward reads cos and sin only; with norms also their input and one number per head.
Source: Su et al., RoFormer, arXiv:2104.09864, section 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels._triton import runs_triton
from fastpack_trl.kernels.fused_form import Layout, NormForm, RotaryForm, Statistics, empty_like, memory_order
from fastpack_trl.kernels.norm import norm as apply_norm
from fastpack_trl.kernels.norm import norm_backward, norm_forward


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm,
    norm: NormForm | None = None, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k rotated, after an RMSNorm of each head if `norm` is given.

    Args:
        q, k: (batch, heads, tokens, dim), heads may differ.
        cos, sin: (batch or 1, tokens, columns), without gradient.
        q_weight, k_weight: (dim,), of the norm; its form has no mean.
    """
    if norm is not None and (q_weight is None or 2 * form.num_pairs(cos) < q.shape[-1]):
        q, k = apply_norm(q, q_weight, None, norm), apply_norm(k, k_weight, None, norm)
        norm = q_weight = k_weight = None
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(q, k, q_weight, k_weight, cos, sin, form, norm)
    return rotated


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, form: RotaryForm, *, back: bool = False) -> Tensor:
    """Write x rotated to `out` and return it; `back`: by the transpose, which maps gradients of results to inputs."""
    pairs, wide = form.num_pairs(cos), torch.promote_types(x.dtype, torch.float32)
    reads, writes = (form.writes, form.reads) if back else (form.reads, form.writes)
    (a, b), (to_a, to_b) = _split(x.to(wide), pairs, reads), _split(out, pairs, writes)
    (cos_a, cos_b), (sin_a, sin_b) = (_columns(each.to(wide)[:, None], pairs, form) for each in (cos, sin))
    to_a.copy_(a * cos_a + b * sin_b if back else a * cos_a - b * sin_a)
    to_b.copy_(b * cos_b - a * sin_a if back else b * cos_b + a * sin_b)
    out[..., 2 * pairs :].copy_(x[..., 2 * pairs :])
    return out


def _split(x: Tensor, pairs: int, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "pairs":
        return x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def _columns(values: Tensor, pairs: int, form: RotaryForm) -> tuple[Tensor, Tensor]:
    if form.columns == "first":
        return values[..., :pairs], values[..., :pairs]
    return _split(values, pairs, form.columns)


def rotary_forward(
    xs: tuple[Tensor, Tensor], weights: tuple[Any, Any], cos: Tensor, sin: Tensor, form: RotaryForm, norm: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return q and k rotated, and for each the inverse root of the mean square per head; none without norm."""
    if runs_triton(*xs, *weights, cos, sin):
        from fastpack_trl.kernels.rotary_triton import rotary_forward_triton

        return rotary_forward_triton(xs, weights, cos, sin, form, norm)
    normal, rstds = list(xs), []
    if norm is not None:
        both = [norm_forward(x, None, weight, None, norm) for x, weight in zip(xs, weights, strict=True)]
        normal, rstds = [out for _, out, _ in both], [statistics.rstd for *_, statistics in both]
    return [rotate(x, cos, sin, form.empty(x, cos), form) for x in normal], rstds


def rotary_backward(
    grads: tuple[Tensor, ...], layouts: list[Layout], saved: tuple[Tensor, ...], weights: tuple[Any, Any],
    cos: Tensor, sin: Tensor, form: RotaryForm, norm: Any, *, of_weights: bool,
) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """Return the gradients of q and k, and those of the weights in fp32 or wider.

    Args:
        grads: of the results.
        layouts: of q and k, for their gradients.
        saved: q, k and their inverse roots if there is a norm.
        weights, cos, sin, form, norm: as in `rotary_forward`.
        of_weights: the weights need gradients.
    """
    if runs_triton(*grads, *weights, cos, sin):
        from fastpack_trl.kernels.rotary_triton import rotary_backward_triton

        return rotary_backward_triton(grads, layouts, saved, weights, cos, sin, form, norm, of_weights=of_weights)
    dtypes = [layout[0] if norm is None else torch.promote_types(layout[0], torch.float32) for layout in layouts]
    outs = [
        rotate(grad, cos, sin, empty_like(grad, dtype, order), form, back=True)
        for grad, dtype, (_, order) in zip(grads, dtypes, layouts, strict=True)
    ]
    if norm is None:
        return outs, [None, None]
    both = [
        norm_backward(x, weight, Statistics(rstd, None), out, None, norm, of_weight=of_weights, of_bias=False)
        for x, rstd, weight, out in zip(saved[:2], saved[2:], weights, outs, strict=True)
    ]
    return [grad for grad, _, _ in both], [grad for _, grad, _ in both]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, *rest: Any) -> tuple[Tensor, ...]:
        cos, sin, form, norm = rest
        outs, rstds = rotary_forward((q, k), (q_weight, k_weight), cos, sin, form, norm)
        saved = () if norm is None else (q, k, *rstds)
        ctx.save_for_backward(cos, sin, q_weight, k_weight, *saved)
        ctx.form, ctx.norm, ctx.layouts = form, norm, [(x.dtype, memory_order(x)) for x in (q, k)]
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, q_weight, k_weight, *saved = ctx.saved_tensors
        weights = q_weight, k_weight
        outs, of_weight = rotary_backward(
            grads, ctx.layouts, tuple(saved), weights, cos, sin, ctx.form, ctx.norm,
            of_weights=any(ctx.needs_input_grad[2:4]),
        )  # fmt: skip
        rounded = [None if g is None else g.to(weight.dtype) for g, weight in zip(of_weight, weights, strict=True)]
        return *outs, *rounded, None, None, None, None
