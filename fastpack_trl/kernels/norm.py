"""Norms over the last axis, alone or of a sum, forward and backward.

Backward reads the input and one number per row (two with a mean), and computes only gradients that are required.
Sources: Zhang and Sennrich, arXiv:1910.07467 (RMSNorm); Ba et al., arXiv:1607.06450 (LayerNorm).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels._triton import runs_triton
from fastpack_trl.kernels.fused_form import NormForm, Statistics

MAX_WIDTH = 32768
"""Widest row of the kernels, which hold whole rows in registers."""


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> Tensor:
    """Return the norm of x (..., width) with its axes in memory order, or contiguous if it centers."""
    # Models view what torch's layer norm returns, which is contiguous also of a transposed input.
    out: Tensor = _Norm.apply(x.contiguous() if form.centers else x, None, weight, bias, form)
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> tuple[Tensor, Tensor]:
    """Return ``x + y`` and its norm; x and y (..., width) have one dtype."""
    total, out = _Norm.apply(x, y, weight, bias, form)
    return total, out


def norm_forward(
    x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: NormForm
) -> tuple[Tensor, Tensor, Statistics]:
    """Return x (or ``x + y``), its norm and what backward needs of each row."""
    if x.shape[-1] <= MAX_WIDTH and runs_triton(x, y, weight, bias):
        from fastpack_trl.kernels.norm_triton import norm_forward_triton

        return norm_forward_triton(x, y, weight, bias, form)
    total = x if y is None else x + y
    wide = total.to(torch.promote_types(form.out_dtype(x, weight), torch.float32))
    mean = wide.mean(-1, keepdim=True) if form.centers else None
    wide = wide if mean is None else wide - mean
    rstd = (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt()
    out = wide * rstd
    out = out.to(x.dtype).to(wide.dtype) if form.rounds else out
    out = out if weight is None else out * (weight.to(wide.dtype) + form.offset)
    out = out if bias is None else out + bias.to(wide.dtype)
    return total, out.to(form.out_dtype(x, weight)), Statistics(rstd, mean)


def norm_backward(
    x: Tensor, weight: Tensor | None, statistics: Statistics, grad: Tensor, grad_x: Tensor | None, form: NormForm,
    *, of_weight: bool, of_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, weight and bias; `grad_x`, the gradient of x from elsewhere, is added to the first.

    The sums over rows are made in a fixed order: the same bits twice. They are fp32 or wider.
    """
    if x.shape[-1] <= MAX_WIDTH and runs_triton(x, weight, grad, grad_x):
        from fastpack_trl.kernels.norm_triton import norm_backward_triton

        return norm_backward_triton(x, weight, statistics, grad, grad_x, form, of_weight=of_weight, of_bias=of_bias)
    rstd, mean = statistics
    normal = (x.to(rstd.dtype) if mean is None else x.to(rstd.dtype) - mean) * rstd
    wide = grad.to(rstd.dtype)
    of_rows = tuple(range(x.dim() - 1))
    grad_weight = (wide * normal).sum(of_rows) if of_weight else None
    grad_bias = wide.sum(of_rows) if of_bias else None
    wide = wide if weight is None else wide * (weight.to(rstd.dtype) + form.offset)
    out = wide - normal * (wide * normal).mean(-1, keepdim=True)
    out = (out if mean is None else out - wide.mean(-1, keepdim=True)) * rstd
    return (out if grad_x is None else out + grad_x).to(x.dtype), grad_weight, grad_bias


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Any, weight: Any, bias: Any, form: NormForm) -> Any:
        total, out, statistics = norm_forward(x, y, weight, bias, form)
        ctx.save_for_backward(total, weight, *statistics)
        ctx.form, ctx.bias_dtype = form, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return out if y is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd, mean = ctx.saved_tensors
        grad_total, grad = grads if len(grads) == 2 else (None, *grads)
        if grad is None:
            return grad_total, grad_total, None, None, None
        needs_x, needs_y, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_x, grad_weight, grad_bias = norm_backward(
            total, weight, Statistics(rstd, mean), grad, grad_total, ctx.form, of_weight=of_weight, of_bias=of_bias
        )
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x if needs_x else None, grad_x if needs_y else None, grad_weight, grad_bias, None
