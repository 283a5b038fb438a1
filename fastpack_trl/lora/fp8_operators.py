"""A LoRA projection over an FP8 base in a graph: the compiler joins the quantisation to what writes x and the gradient.

The products are operators, as in `operators`: the base's first, the thin one accumulated into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.fp8 import Quantised, quantise_rows_torch
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.lora.base_weight import Fp8Weight
from fastpack_trl.lora.operators import add_thin_gradient

_BASE = arguments_of(Fp8Weight)


def fp8_product(
    values: Tensor, row_scales: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any
) -> Tensor:
    """Return ``bias + rows W^T + reduced B^T`` over the fields of an `Fp8Weight`.

    Shapes: values (tokens, in_features) and row_scales (tokens, groups), the quantised rows; reduced (tokens, rank);
    b (out_features, rank); bias (out_features,); returns (tokens, out_features) in the dtype of `reduced`.
    """
    out = Fp8Weight(*base).product(Quantised(values, row_scales), reduced.dtype)
    torch.addmm(out, reduced, b.t(), out=out)
    return out if bias is None else out.add_(bias)


def fp8_grad_input(
    values: Tensor, row_scales: Tensor, grad_reduced: Tensor | None, a: Tensor | None, dtype: torch.dtype, *base: Any
) -> Tensor:
    """Return ``grad W + grad_reduced A`` over the fields of an `Fp8Weight`.

    Shapes: values (tokens, out_features) and row_scales (tokens, groups), of `Fp8Weight.quantised_grad`; grad_reduced
    (tokens, rank) and a (rank, in_features), or neither; returns (tokens, in_features) in `dtype`.
    """
    return add_thin_gradient(Fp8Weight(*base).grad_input(Quantised(values, row_scales), dtype), grad_reduced, a)


def _fake_product(values: Tensor, row_scales: Tensor, reduced: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return reduced.new_empty(values.shape[0], b.shape[0])


def _fake_grad_input(
    values: Tensor, row_scales: Tensor, grad_reduced: Any, a: Any, dtype: torch.dtype, weight: Tensor, *rest: Any
) -> Tensor:
    return values.new_empty((values.shape[0], weight.shape[1]), dtype=dtype)


def _flops_product(values: Tensor, row_scales: Tensor, reduced: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> int:
    return int(2 * values.shape[0] * b.shape[0] * (values.shape[1] + b.shape[1]))


def _flops_grad_input(
    values: Tensor, row_scales: Tensor, grad_reduced: Tensor | None, *rest: Any, out_val: Tensor, **kwargs: Any
) -> int:
    rank = 0 if grad_reduced is None else grad_reduced.shape[1]
    return int(2 * values.shape[0] * out_val.shape[1] * (values.shape[1] + rank))


_product = operator(
    fp8_product, fake=_fake_product, flops=_flops_product,
    signature=f"(Tensor values, Tensor row_scales, Tensor reduced, Tensor b, Tensor? bias, {_BASE}) -> Tensor",
)  # fmt: skip
_grad_input = operator(
    fp8_grad_input, fake=_fake_grad_input, flops=_flops_grad_input,
    signature=(
        f"(Tensor values, Tensor row_scales, Tensor? grad_reduced, Tensor? a, ScalarType dtype, {_BASE}) -> Tensor"
    ),
)  # fmt: skip


class _Projection(torch.autograd.Function):
    """``rows, dropped or None, reduced, a, b, bias or None``, then the fields of `Fp8Weight`.

    `reduced` is made outside of the gradient: the derivative here is that of the whole projection.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        rows, dropped, reduced, a, b, bias, *base = inputs
        out: Tensor = _product(*Fp8Weight(*base).quantised(rows, quantise_rows_torch), reduced, b, bias, *base)
        ctx.save_for_backward(rows if dropped is None else dropped, reduced, a, b, *base)
        ctx.separate = dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, reduced, a, b, *base = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_a, needs_b, needs_bias, *of_base = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_reduced = grad.mm(b)
        grad_x = grad_dropped = None
        if needs_x:
            quantised = Fp8Weight(*base).quantised_grad(grad, quantise_rows_torch)
            added = (None, None) if ctx.separate else (grad_reduced, a)
            grad_x = _grad_input(*quantised, *added, grad.dtype, *base)
        if ctx.separate and needs_dropped:
            grad_dropped = grad_reduced.mm(a)
        grad_a = grad_reduced.t().mm(source) if needs_a else None
        grad_b = grad.t().mm(reduced) if needs_b else None
        grad_bias = grad.sum(0) if needs_bias else None
        return (grad_x, grad_dropped, None, grad_a, grad_b, grad_bias, *[None] * len(of_base))


fp8_projection = differentiable(
    "lora_fp8_projection",
    f"(Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias, {_BASE}) -> Tensor",
    _Projection,
)
