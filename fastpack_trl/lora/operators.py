"""The two products of a LoRA projection as operators, for graphs.

A compiler that is given ``addmm`` copies the addend before the product, and one that is given bitsandbytes' operators
sees the dequantisations of forward and backward as one common subexpression and saves the dense weight of every layer.
These operators hide both. Their derivative is registered with them, not in a `torch.autograd.Function` around them: in
a compiled checkpoint only operators that stand in the graph themselves are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastpack_trl.lora.base_weight import BaseWeight, add_product, grad_input

_BASE = (
    "Tensor weight, Tensor? absmax, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "int nested_blocksize, int blocksize, str quant_type, int out_features, int in_features, ScalarType dtype"
)
_library = torch.library.Library("fastpack", "FRAGMENT")
_library.define(
    f"lora_product(Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias, {_BASE}) -> Tensor"
)
_library.define(f"lora_grad_input(Tensor grad, Tensor? grad_reduced, Tensor? a, {_BASE}) -> Tensor")


def product(
    rows: Tensor, dropped: Tensor | None, reduced: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, *base: Any
) -> Tensor:
    """``bias + reduced B^T + rows W^T``, the second product accumulated into the first.

    Shapes: rows (tokens, in_features), dropped the same or None, reduced (tokens, rank), a (rank, in_features),
    b (out_features, rank), bias (out_features,); returns (tokens, out_features). `reduced` is ``rows A^T``, or
    ``dropped A^T``, made outside of the gradient: the derivative of this operator is that of the whole projection.
    """
    low = reduced.mm(b.t()) if bias is None else torch.addmm(bias, reduced, b.t())
    return add_product(low, rows, BaseWeight(*base))


def input_gradient(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    """``grad W + grad_reduced A``, the second product accumulated into the first.

    Shapes: grad (tokens, out_features), grad_reduced (tokens, rank), a (rank, in_features); returns (tokens,
    in_features). Without `grad_reduced`, the base's part alone.
    """
    total = grad_input(grad, BaseWeight(*base))
    if grad_reduced is None or a is None:
        return total
    return torch.addmm(total, grad_reduced, a, out=total)


_library.impl("lora_product", product, "CompositeExplicitAutograd")
_library.impl("lora_grad_input", input_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("fastpack::lora_product", lib=_library)
def _(
    rows: Tensor, dropped: Tensor | None, reduced: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, *base: Any
) -> Tensor:
    return rows.new_empty(rows.shape[0], b.shape[0])


@torch.library.register_fake("fastpack::lora_grad_input", lib=_library)
def _(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    of = BaseWeight(*base)
    assert of.weight is not None
    return grad.new_empty(grad.shape[0], of.weight.shape[1] if of.absmax is None else of.in_features)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, dropped, reduced, a, b, _, weight, *rest = inputs
    ctx.save_for_backward(rows if dropped is None else dropped, reduced, a, b, weight, *rest[:4])
    ctx.constants, ctx.separate = rest[4:], dropped is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    source, reduced, a, b, *tensors = ctx.saved_tensors
    base = (*tensors, *ctx.constants)
    gradients = projection_gradients(ctx.needs_input_grad, grad.contiguous(), source, reduced, a, b, base, ctx.separate)
    grad_x, grad_dropped, grad_a, grad_b, grad_bias = gradients
    return (grad_x, grad_dropped, None, grad_a, grad_b, grad_bias, *[None] * len(base))


def projection_gradients(
    needs: Any, grad: Tensor, source: Tensor, reduced: Tensor, a: Tensor, b: Tensor, base: tuple[Any, ...],
    separate: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of rows, dropped, a, b and bias in a graph; `needs` by the position of `product`'s arguments."""
    grad_reduced = grad.mm(b)
    grad_x = grad_dropped = None
    if separate:
        grad_x = torch.ops.fastpack.lora_grad_input(grad, None, None, *base) if needs[0] else None
        grad_dropped = grad_reduced.mm(a) if needs[1] else None
    elif needs[0]:
        grad_x = torch.ops.fastpack.lora_grad_input(grad, grad_reduced, a, *base)
    grad_a = grad_reduced.t().mm(source) if needs[3] else None
    grad_b = grad.t().mm(reduced) if needs[4] else None
    return grad_x, grad_dropped, grad_a, grad_b, grad.sum(0) if needs[5] else None


torch.library.register_autograd("fastpack::lora_product", _backward, setup_context=_setup_context, lib=_library)


@register_flop_formula(torch.ops.fastpack.lora_product)
def _flops(
    rows_shape: Any, dropped_shape: Any, reduced_shape: Any, a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return int(2 * rows_shape[0] * b_shape[0] * (rows_shape[1] + b_shape[1]))


@register_flop_formula(torch.ops.fastpack.lora_grad_input)
def _flops_backward(
    grad_shape: Any, grad_reduced_shape: Any, a_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    rank = 0 if a_shape is None else a_shape[0]
    return int(2 * grad_shape[0] * out_shape[1] * (grad_shape[1] + rank))
