"""One LoRA projection: ``bias + (x A^T) B^T``, and the base product accumulated into it.

Eagerly it consists of the autograd nodes of `nodes`, in a graph of operators. A compiler would copy the addend of
``addmm``, and would treat bitsandbytes' dequantizations of forward and backward as one common subexpression and save
the dense weight of every layer. Operators hide both. A dense base has its own: arguments cost host time too, about 1 us
each.

Shapes: x (..., in_features); a (rank, in_features); b (out_features, rank), the scaling multiplied into it; all in one
dtype. In operators rows are (tokens, in_features), grad (tokens, out_features), reduced ``rows A^T`` and grad_reduced
``grad B`` (tokens, rank). Source: Hu et al., LoRA, arXiv:2106.09685, section 4.1; Dettmers et al., QLoRA,
arXiv:2305.14314, equation 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input
from fastpack_trl.lora.nodes import add_thin_gradient, project, rows_of, thin_product

_NUM_TENSORS = 5
"""First fields of `BaseWeight` that are tensors; `Fp8Weight` has fewer, and nothing else."""
_KINDS = (("", "Tensor weight"), ("_4bit", arguments_of(BaseWeight)), ("_fp8", arguments_of(Fp8Weight)))
"""Suffix and arguments of the operators over a base weight; an operator is found by the number of these arguments."""


def lora_projection(
    x: Tensor, base: BaseWeight | Fp8Weight, a: Tensor, b: Tensor, bias: Tensor | None = None, dropped: Any = None
) -> Tensor:
    """Return ``x W^T + bias + (x A^T) B^T``; saves x, x A^T and the adapter for backward, nothing of the base.

    Args:
        x, a, b: of the shapes above.
        base: the frozen weight, (out_features, in_features); in FP8 x is quantized for its product, and the gradient.
        bias: (out_features,) or None.
        dropped: input of the adapter in place of x, with dropout applied; shape of x.

    Returns:
        (..., out_features), contiguous, dtype of x.
    """
    if not torch.compiler.is_compiling():
        return project(x, [(base, a, b, bias)], dropped)[0]
    rows, source = rows_of(x), None if dropped is None else rows_of(dropped)
    # Outside of the operator, so that a recompute can make it without the base product.
    reduced = (rows if source is None else source).detach().mm(a.detach().t())
    fields = base if isinstance(base, Fp8Weight) or base.absmax is not None else base[:1]
    out: Tensor = _projections[len(fields)](rows, source, reduced, a, b, bias, *fields)
    return out.view(*x.shape[:-1], b.shape[0])


class _Projection(torch.autograd.Function):
    """The whole projection in a compiled graph.

    Arguments: x, dropped or None, reduced, a, b, bias or None, then fields of the base, as in `_KINDS`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Any, reduced: Any, a: Tensor, b: Tensor, bias: Any, *base: Any) -> Tensor:
        ctx.base, ctx.is_dropped = base[_NUM_TENSORS:], dropped is not None
        ctx.save_for_backward(x if dropped is None else dropped, reduced, a, b, *base[:_NUM_TENSORS])
        out: Tensor = _products[len(base)](x, reduced, b, bias, *base)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, reduced, a, b, *tensors = ctx.saved_tensors
        base = (*tensors, *ctx.base)
        needs_x, needs_dropped, _, needs_a, needs_b, needs_bias, *of_base = ctx.needs_input_grad
        grad = rows_of(grad.contiguous())
        grad_reduced = grad.mm(b)
        grad_x = grad_dropped = None
        if needs_x:
            thin, factor = (None, None) if ctx.is_dropped else (grad_reduced, a)
            grad_x = _grad_inputs[len(base)](grad, thin, factor, *base).view(source.shape)
        if ctx.is_dropped and needs_dropped:
            grad_dropped = grad_reduced.mm(a).view(source.shape)
        grad_a = grad_reduced.t().mm(rows_of(source)) if needs_a else None
        grad_b = grad.t().mm(reduced) if needs_b else None
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_x, grad_dropped, None, grad_a, grad_b, grad_bias, *[None] * len(of_base)


def _weight(fields: tuple[Any, ...]) -> BaseWeight | Fp8Weight:
    return Fp8Weight(*fields) if len(fields) == len(Fp8Weight._fields) else BaseWeight(*fields)


def lora_product(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any) -> Tensor:
    """Return ``bias + reduced B^T + rows W^T``, the last product added in place; `base`: fields of the weight."""
    return add_product(thin_product(reduced, b, bias), rows, _weight(base))


def lora_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    """Return ``grad W + grad_reduced A``, the second product accumulated; without `grad_reduced`, the base's alone."""
    return add_thin_gradient(grad_input(grad, _weight(base)), grad_reduced, a)


def _fake_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return reduced.new_empty(rows.shape[0], b.shape[0])


def _fake_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    # Packed 4-bit storage has another shape.
    of = _weight(base)
    return grad.new_empty(grad.shape[0], getattr(of, "in_features", 0) or of.weight.shape[1])


def _flops_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> int:
    return int(2 * rows.shape[0] * b.shape[0] * (rows.shape[1] + b.shape[1]))


def _flops_grad_input(grad: Tensor, grad_reduced: Tensor | None, *rest: Any, out_val: Tensor, **kwargs: Any) -> int:
    rank = 0 if grad_reduced is None else grad_reduced.shape[1]
    return int(2 * grad.shape[0] * out_val.shape[1] * (grad.shape[1] + rank))


_products, _grad_inputs = (
    {
        fields.count(",") + 1: operator(
            function, fake=fake, flops=flops, name=f"{function.__name__}{suffix}",
            signature=f"({arguments}, {fields}) -> Tensor",
        )
        for suffix, fields in _KINDS
    }
    for function, fake, flops, arguments in (
        (lora_product, _fake_product, _flops_product, "Tensor rows, Tensor reduced, Tensor b, Tensor? bias"),
        (lora_grad_input, _fake_grad_input, _flops_grad_input, "Tensor grad, Tensor? grad_reduced, Tensor? a"),
    )
)  # fmt: skip
_ARGUMENTS = "Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias"
_projections = {
    fields.count(",") + 1: differentiable(
        f"lora_projection{suffix}", f"({_ARGUMENTS}, {fields}) -> Tensor", _Projection
    )
    for suffix, fields in _KINDS
}
