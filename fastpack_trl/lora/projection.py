"""One LoRA projection: ``bias + (x A^T) B^T``, and the base product accumulated into it.

Eagerly it consists of the autograd nodes of `nodes`, in a graph of operators. A compiler would copy the addend of
``addmm``, and would treat bitsandbytes' dequantizations of forward and backward as one common subexpression and save
the dense weight of every layer. Operators hide both. A dense base has its own: arguments cost host time too, about 1 us
each. Over an FP8 base the quantization stays in the graph, where the compiler fuses it with what writes x and the
gradient.

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

from fastpack_trl.kernels.fp8 import Quantized, quantize_rows_torch
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input
from fastpack_trl.lora.nodes import add_thin_gradient, project, rows_of, thin_product

_NUM_TENSORS = 5
"""First fields of `BaseWeight` that are tensors; `Fp8Weight` has fewer, and nothing else."""


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
    operation = _fp8_projection if isinstance(base, Fp8Weight) else _lora_projection
    out: Tensor = operation(rows, source, reduced, a, b, bias, *base).view(*x.shape[:-1], b.shape[0])
    return out


class _Projection(torch.autograd.Function):
    """The whole projection in a compiled graph.

    Arguments: x, dropped or None, reduced, a, b, bias or None, then the fields of `BaseWeight` or `Fp8Weight`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Any, reduced: Any, a: Tensor, b: Tensor, bias: Any, *base: Any) -> Tensor:
        ctx.base, ctx.is_dropped = base[_NUM_TENSORS:], dropped is not None
        ctx.save_for_backward(x if dropped is None else dropped, reduced, a, b, *base[:_NUM_TENSORS])
        return _product_in_graph(x, reduced, b, bias, base)

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
            grad_x = _grad_input_in_graph(grad, thin, factor, *base).view(source.shape)
        if ctx.is_dropped and needs_dropped:
            grad_dropped = grad_reduced.mm(a).view(source.shape)
        grad_a = grad_reduced.t().mm(rows_of(source)) if needs_a else None
        grad_b = grad.t().mm(reduced) if needs_b else None
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_x, grad_dropped, None, grad_a, grad_b, grad_bias, *[None] * len(of_base)


def _product_in_graph(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, base: tuple[Any, ...]) -> Tensor:
    out: Tensor
    if _is_fp8(base):
        values, scales = quantize_rows_torch(rows)
        out = _fp8_product(values, reduced, b, bias, scales, *base)
    elif BaseWeight(*base).absmax is None:
        out = _product(rows, reduced, b, bias, base[0])
    else:
        out = _product_4bit(rows, reduced, b, bias, *base)
    return out


def _grad_input_in_graph(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    out: Tensor
    if _is_fp8(base):
        values, scales = Fp8Weight(*base).quantized_grad(grad, quantize_rows_torch)
        out = _fp8_grad_input(values, grad_reduced, a, scales, grad.dtype, *base)
    elif BaseWeight(*base).absmax is None:
        out = _grad_input(grad, grad_reduced, a, base[0])
    else:
        out = _grad_input_4bit(grad, grad_reduced, a, *base)
    return out


def _is_fp8(base: tuple[Any, ...]) -> bool:
    return len(base) == len(Fp8Weight._fields)


def lora_product(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any) -> Tensor:
    """Return ``bias + reduced B^T + rows W^T``, the last product added in place; `base`: fields of a `BaseWeight`."""
    return add_product(thin_product(reduced, b, bias), rows, BaseWeight(*base))


def lora_grad_input(grad: Tensor, grad_reduced: Tensor | None, a: Tensor | None, *base: Any) -> Tensor:
    """Return ``grad W + grad_reduced A``, the second product accumulated; without `grad_reduced`, the base's alone."""
    weight = Fp8Weight(*base) if _is_fp8(base) else BaseWeight(*base)
    return add_thin_gradient(grad_input(grad, weight), grad_reduced, a)


def fp8_product(
    values: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, row_scales: Tensor, *base: Any
) -> Tensor:
    """Compute `lora_product` of quantized rows over the fields of an `Fp8Weight`, in the dtype of `reduced`."""
    out = Fp8Weight(*base).product(Quantized(values, row_scales), reduced.dtype)
    torch.addmm(out, reduced, b.t(), out=out)
    return out if bias is None else out.add_(bias)


def fp8_grad_input(
    values: Tensor, grad_reduced: Tensor | None, a: Tensor | None, row_scales: Tensor, dtype: torch.dtype, *base: Any
) -> Tensor:
    """Compute `lora_grad_input` in `dtype` of a gradient of `Fp8Weight.quantized_grad`."""
    return add_thin_gradient(Fp8Weight(*base).grad_input(Quantized(values, row_scales), dtype), grad_reduced, a)


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
_product, _product_4bit, _fp8_product = (
    operator(
        function, fake=_fake_product, flops=_flops_product, name=name, signature=f"({_OF_PRODUCT}, {rest}) -> Tensor"
    )
    for function, name, rest in (
        (lora_product, "lora_product", "Tensor weight"),
        (lora_product, "lora_product_4bit", _BASE),
        (fp8_product, "fp8_product", f"Tensor row_scales, {_FP8_BASE}"),
    )
)
_grad_input, _grad_input_4bit, _fp8_grad_input = (
    operator(function, fake=fake, flops=_flops_grad_input, name=name, signature=f"({_OF_GRADIENT}, {rest}) -> Tensor")
    for function, fake, name, rest in (
        (lora_grad_input, _fake_grad_input, "lora_grad_input", "Tensor weight"),
        (lora_grad_input, _fake_grad_input, "lora_grad_input_4bit", _BASE),
        (fp8_grad_input, _fake_fp8_grad_input, "fp8_grad_input", f"Tensor row_scales, ScalarType dtype, {_FP8_BASE}"),
    )
)
_lora_projection, _fp8_projection = (
    differentiable(
        name,
        f"(Tensor rows, Tensor? dropped, Tensor reduced, Tensor a, Tensor b, Tensor? bias, {base}) -> Tensor",
        _Projection,
    )
    for name, base in (("lora_projection", _BASE), ("lora_fp8_projection", _FP8_BASE))
)
