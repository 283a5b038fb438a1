"""The two products of a LoRA projection as operators, for graphs.

A compiler that is given ``addmm`` copies the addend before the product, and one that is given bitsandbytes' operators
sees the dequantisations of forward and backward as one common subexpression and saves the dense weight of every layer.
These operators hide both. A dense base has its own: arguments cost host time too, about 1 us each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import differentiable, operator
from fastpack_trl.lora.base_weight import BaseWeight, add_product, grad_input

_QUANTISED = (
    "Tensor weight, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "int nested_blocksize, int blocksize, str quant_type, int out_features, int in_features, ScalarType dtype"
)
_BASE = _QUANTISED.replace("Tensor absmax", "Tensor? absmax")


def thin_product(reduced: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``bias + reduced B^T``, (tokens, out_features). Shapes: reduced (tokens, rank), b (out_features, rank)."""
    return reduced.mm(b.t()) if bias is None else torch.addmm(bias, reduced, b.t())


def add_thin_gradient(total: Tensor, grad_reduced: Tensor | None, a: Tensor | None) -> Tensor:
    """Add in place: ``total += grad_reduced A``. Shapes: total (tokens, in_features), grad_reduced (tokens, rank)."""
    if grad_reduced is None or a is None:
        return total
    return torch.addmm(total, grad_reduced, a, out=total)


def lora_product(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
    """Return ``bias + reduced B^T + rows W^T``, the second product accumulated into the first.

    Shapes: rows (tokens, in_features), reduced = ``rows A^T`` or that of the dropped rows, (tokens, rank),
    b (out_features, rank), bias (out_features,), weight (out_features, in_features), all of one dtype; returns
    (tokens, out_features).
    """
    low = thin_product(reduced, b, bias)
    return torch.addmm(low, rows, weight.t(), out=low)


def lora_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, weight: Tensor) -> Tensor:
    """Return ``grad W + grad_reduced A``, the second product accumulated into the first.

    Shapes: grad (tokens, out_features), grad_reduced (tokens, rank), a (rank, in_features); returns (tokens,
    in_features). Without `grad_reduced`, the base's part alone.
    """
    return add_thin_gradient(grad.mm(weight), grad_reduced, a)


def lora_product_4bit(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any) -> Tensor:
    """Compute `lora_product` over the fields of a 4-bit `BaseWeight`."""
    return add_product(thin_product(reduced, b, bias), rows, BaseWeight(*base))


def lora_grad_input_4bit(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    """Compute `lora_grad_input` over the fields of a 4-bit `BaseWeight`."""
    return add_thin_gradient(grad_input(grad, BaseWeight(*base)), grad_reduced, a)


def _fake_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], b.shape[0])


def _fake_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    of = BaseWeight(*base)
    assert of.weight is not None
    return grad.new_empty(grad.shape[0], of.weight.shape[1] if of.absmax is None else of.in_features)


def _flops_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> int:
    return int(2 * rows.shape[0] * b.shape[0] * (rows.shape[1] + b.shape[1]))


def _flops_grad_input(
    grad: Tensor, grad_reduced: Tensor | None, *rest: Any, out_val: Tensor, **kwargs: Any
) -> int:  # fmt: skip
    rank = 0 if grad_reduced is None else grad_reduced.shape[1]
    return int(2 * grad.shape[0] * out_val.shape[1] * (grad.shape[1] + rank))


_OF_PRODUCT = "Tensor rows, Tensor reduced, Tensor b, Tensor? bias"
_OF_GRADIENT = "Tensor grad, Tensor? grad_reduced, Tensor? a"
_product = operator(lora_product, fake=_fake_product, flops=_flops_product)
_grad_input = operator(lora_grad_input, fake=_fake_grad_input, flops=_flops_grad_input)
_product_4bit = operator(
    lora_product_4bit, fake=_fake_product, flops=_flops_product, signature=f"({_OF_PRODUCT}, {_QUANTISED}) -> Tensor"
)
_grad_input_4bit = operator(
    lora_grad_input_4bit, fake=_fake_grad_input, flops=_flops_grad_input,
    signature=f"({_OF_GRADIENT}, {_QUANTISED}) -> Tensor",
)  # fmt: skip


class _Projection(torch.autograd.Function):
    """``rows, dropped or None, reduced, a, b, bias or None``, then the fields of `BaseWeight`.

    `reduced` is made outside of the gradient: the derivative here is that of the whole projection.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        rows, dropped, reduced, a, b, bias, weight, absmax, *rest = inputs
        if absmax is None:
            out: Tensor = _product(rows, reduced, b, bias, weight)
        else:
            out = _product_4bit(rows, reduced, b, bias, weight, absmax, *rest)
        ctx.save_for_backward(rows if dropped is None else dropped, reduced, a, b, weight, absmax, *rest[:3])
        ctx.constants, ctx.separate = rest[3:], dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, reduced, a, b, *tensors = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_a, needs_b, needs_bias, *of_base = ctx.needs_input_grad
        base = (*tensors, *ctx.constants)
        grad = grad.contiguous()
        grad_reduced = grad.mm(b)
        grad_x = grad_dropped = None
        if ctx.separate:
            grad_x = _input_gradient(grad, None, None, base) if needs_x else None
            grad_dropped = grad_reduced.mm(a) if needs_dropped else None
        elif needs_x:
            grad_x = _input_gradient(grad, grad_reduced, a, base)
        grad_a = grad_reduced.t().mm(source) if needs_a else None
        grad_b = grad.t().mm(reduced) if needs_b else None
        grad_bias = grad.sum(0) if needs_bias else None
        return (grad_x, grad_dropped, None, grad_a, grad_b, grad_bias, *[None] * len(of_base))


def _input_gradient(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, base: tuple[Any, ...]) -> Tensor:
    if base[1] is None:
        out: Tensor = _grad_input(grad, grad_reduced, a, base[0])
    else:
        out = _grad_input_4bit(grad, grad_reduced, a, *base)
    return out


lora_projection = differentiable(
    "lora_projection",
    f"(Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias, {_BASE}) -> Tensor",
    _Projection,
)
