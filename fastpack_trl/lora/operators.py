"""A LoRA projection in a graph: two products, each with its thin product accumulated, as operators by kind of base.

A compiler that is given ``addmm`` copies the addend before the product, and one that is given bitsandbytes' operators
sees the dequantisations of forward and backward as one common subexpression and saves the dense weight of every layer.
These operators hide both. A dense base has its own: arguments cost host time too, about 1 us each. Over an FP8 base the
quantisation stays in the graph, where the compiler joins it to what writes x and the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.fp8 import Quantised, quantise_rows_torch
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input

_NUM_TENSORS = 5
"""First fields of `BaseWeight` that are tensors; `Fp8Weight` has fewer, and nothing else."""


def thin_product(reduced: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``bias + reduced B^T``, (tokens, out_features). Shapes: reduced (tokens, rank), b (out_features, rank)."""
    return reduced.mm(b.t()) if bias is None else torch.addmm(bias, reduced, b.t())


def add_thin_gradient(total: Tensor, grad_reduced: Tensor | None, a: Tensor | None) -> Tensor:
    """Add in place: ``total += grad_reduced A``. Shapes: total (tokens, in_features), grad_reduced (tokens, rank)."""
    if grad_reduced is None or a is None:
        return total
    return torch.addmm(total, grad_reduced, a, out=total)


def projection_gradients(
    grad: Tensor,
    source: Tensor,
    reduced: Tensor,
    a: Tensor,
    b: Tensor,
    needed: Sequence[bool],
    through_base: Callable[[Tensor | None, Tensor | None], Tensor],
    *,
    dropped: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, of the dropped x, a, b and the bias; None where not needed.

    Shapes: grad (tokens, out_features), source (tokens, in_features), reduced (tokens, rank); a and b as theirs.

    Args:
        source: what the adapter read: x, or the dropped x.
        reduced: ``source A^T``.
        needed: one entry per result.
        through_base: of ``grad B`` and A, or of None twice, the gradient that comes through the base, theirs added.
        dropped: the adapter read another input than the base.
    """
    needs_x, needs_dropped, needs_a, needs_b, needs_bias = needed
    grad_reduced = grad.mm(b)
    grad_x = grad_dropped = None
    if needs_x:
        grad_x = through_base(None, None) if dropped else through_base(grad_reduced, a)
    if dropped and needs_dropped:
        grad_dropped = grad_reduced.mm(a)
    grad_a = grad_reduced.t().mm(source) if needs_a else None
    grad_b = grad.t().mm(reduced) if needs_b else None
    return grad_x, grad_dropped, grad_a, grad_b, grad.sum(0) if needs_bias else None


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


def fp8_product(
    values: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, row_scales: Tensor, *base: Any
) -> Tensor:
    """Compute `lora_product` over the fields of an `Fp8Weight`, the base's product first.

    Shapes: values (tokens, in_features) and row_scales (tokens, groups), the quantised rows; the result has the dtype
    of `reduced`.
    """
    out = Fp8Weight(*base).product(Quantised(values, row_scales), reduced.dtype)
    torch.addmm(out, reduced, b.t(), out=out)
    return out if bias is None else out.add_(bias)


def fp8_grad_input(
    values: Tensor, grad_reduced: Tensor | None, a: Tensor | None, row_scales: Tensor, dtype: torch.dtype, *base: Any
) -> Tensor:
    """Compute `lora_grad_input` in `dtype` over the fields of an `Fp8Weight`.

    Shapes: values (tokens, out_features) and row_scales (tokens, groups), of `Fp8Weight.quantised_grad`.
    """
    return add_thin_gradient(Fp8Weight(*base).grad_input(Quantised(values, row_scales), dtype), grad_reduced, a)


def _fake_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return reduced.new_empty(rows.shape[0], b.shape[0])


def _fake_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    of = BaseWeight(*base)
    return grad.new_empty(grad.shape[0], of.weight.shape[1] if of.absmax is None else of.in_features)


def _fake_fp8_grad_input(
    values: Tensor, grad_reduced: Any, a: Any, row_scales: Tensor, dtype: torch.dtype, weight: Tensor, *rest: Any
) -> Tensor:
    return values.new_empty((values.shape[0], weight.shape[1]), dtype=dtype)


def _flops_product(rows: Tensor, reduced: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> int:
    return int(2 * rows.shape[0] * b.shape[0] * (rows.shape[1] + b.shape[1]))


def _flops_grad_input(grad: Tensor, grad_reduced: Tensor | None, *rest: Any, out_val: Tensor, **kwargs: Any) -> int:
    rank = 0 if grad_reduced is None else grad_reduced.shape[1]
    return int(2 * grad.shape[0] * out_val.shape[1] * (grad.shape[1] + rank))


_BASE, _FP8_BASE = arguments_of(BaseWeight), arguments_of(Fp8Weight)
_OF_PRODUCT = "Tensor rows, Tensor reduced, Tensor b, Tensor? bias"
_OF_GRADIENT = "Tensor grad, Tensor? grad_reduced, Tensor? a"
_product, _product_4bit, _product_fp8 = (
    operator(function, fake=_fake_product, flops=_flops_product, signature=f"({_OF_PRODUCT}, {rest}) -> Tensor")
    for function, rest in (
        (lora_product, "Tensor weight"),
        (lora_product_4bit, _BASE),
        (fp8_product, f"Tensor row_scales, {_FP8_BASE}"),
    )
)
_grad_input, _grad_input_4bit, _grad_input_fp8 = (
    operator(function, fake=fake, flops=_flops_grad_input, signature=f"({_OF_GRADIENT}, {rest}) -> Tensor")
    for function, fake, rest in (
        (lora_grad_input, _fake_grad_input, "Tensor weight"),
        (lora_grad_input_4bit, _fake_grad_input, _BASE),
        (fp8_grad_input, _fake_fp8_grad_input, f"Tensor row_scales, ScalarType dtype, {_FP8_BASE}"),
    )
)


class _Projection(torch.autograd.Function):
    """``rows, dropped or None, reduced, a, b, bias or None``, then the fields of `BaseWeight` or `Fp8Weight`.

    `reduced` is made outside of the gradient: the derivative here is that of the whole projection.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        rows, dropped, reduced, a, b, bias, *base = inputs
        out: Tensor
        if len(base) == len(Fp8Weight._fields):
            values, scales = Fp8Weight(*base).quantised(rows, quantise_rows_torch)
            out = _product_fp8(values, reduced, b, bias, scales, *base)
        elif BaseWeight(*base).absmax is None:
            out = _product(rows, reduced, b, bias, base[0])
        else:
            out = _product_4bit(rows, reduced, b, bias, *base)
        ctx.save_for_backward(rows if dropped is None else dropped, reduced, a, b, *base[:_NUM_TENSORS])
        ctx.constants, ctx.dropped = base[_NUM_TENSORS:], dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, reduced, a, b, *tensors = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_a, needs_b, needs_bias, *of_base = ctx.needs_input_grad
        needed = (needs_x, needs_dropped, needs_a, needs_b, needs_bias)
        grad = grad.contiguous()
        through_base = partial(_grad_through_base, grad, (*tensors, *ctx.constants))
        grad_x, grad_dropped, *grads = projection_gradients(
            grad, source, reduced, a, b, needed, through_base, dropped=ctx.dropped
        )
        return grad_x, grad_dropped, None, *grads, *[None] * len(of_base)


def _grad_through_base(grad: Tensor, base: tuple[Any, ...], grad_reduced: Tensor | None, a: Tensor | None) -> Tensor:
    out: Tensor
    if len(base) == len(Fp8Weight._fields):
        values, scales = Fp8Weight(*base).quantised_grad(grad, quantise_rows_torch)
        out = _grad_input_fp8(values, grad_reduced, a, scales, grad.dtype, *base)
    elif BaseWeight(*base).absmax is None:
        out = _grad_input(grad, grad_reduced, a, base[0])
    else:
        out = _grad_input_4bit(grad, grad_reduced, a, *base)
    return out


lora_projection, fp8_projection = (
    differentiable(
        name,
        f"(Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias, {base}) -> Tensor",
        _Projection,
    )
    for name, base in (("lora_projection", _BASE), ("lora_fp8_projection", _FP8_BASE))
)
