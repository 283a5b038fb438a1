"""One LoRA projection: ``bias + x W^T + (x A^T) B^T``.

Eagerly it consists of the autograd nodes of `nodes`. In a compiled graph the base product is an operator: a compiler
would treat bitsandbytes' dequantizations of forward and backward as one common subexpression and save the dense weight
of every layer.

Shapes: x (..., in_features); a (rank, in_features); b (out_features, rank), the scaling multiplied into it; all in one
dtype. In operators rows are (tokens, in_features), grad (tokens, out_features). Source: Hu et al., LoRA,
arXiv:2106.09685, section 4.1; Dettmers et al., QLoRA, arXiv:2305.14314, equation 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.kernels.fp8 import quantize_rows
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, grad_input
from fastpack_trl.lora.nodes import project, rows_of

_NUM_TENSORS = 5
"""First fields of `BaseWeight` that are tensors; `Fp8Weight` has fewer, and nothing else."""
_KINDS = {"dense": "Tensor weight", "4bit": arguments_of(BaseWeight), "fp8": arguments_of(Fp8Weight)}
"""Arguments of the operators over a kind of base weight; an operator is found by the number of these arguments."""


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
    # Arguments cost host time, about 1 us each: a dense weight comes alone.
    fields = base if isinstance(base, Fp8Weight) or base.absmax is not None else base[:1]
    out: Tensor = _projections[len(fields)](rows_of(x), *fields).view(*x.shape[:-1], b.shape[0])
    return out + F.linear(F.linear(x if dropped is None else dropped, a), b, bias)


class _BaseProduct(torch.autograd.Function):
    """``rows W^T`` in a compiled graph. Arguments: rows, then fields of the base, as in `_KINDS`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *base: Any) -> Tensor:
        ctx.save_for_backward(*base[:_NUM_TENSORS])
        ctx.constants = base[_NUM_TENSORS:]
        out: Tensor = _products[len(base)](rows, *base)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        base = (*ctx.saved_tensors, *ctx.constants)
        return _grad_inputs[len(base)](grad.contiguous(), *base), *[None] * len(base)


def _weight(fields: tuple[Any, ...]) -> BaseWeight | Fp8Weight:
    return Fp8Weight(*fields) if len(fields) == len(Fp8Weight._fields) else BaseWeight(*fields)


def lora_product(rows: Tensor, *fields: Any) -> Tensor:
    """Return ``rows W^T``."""
    base = _weight(fields)
    if isinstance(base, Fp8Weight):
        return base.product(quantize_rows(rows), rows.dtype)
    return rows.mm(base.dense(rows.dtype).t())


def lora_grad_input(grad: Tensor, *fields: Any) -> Tensor:
    """Return ``grad W``."""
    return grad_input(grad, _weight(fields))


def _fake_product(rows: Tensor, *fields: Any) -> Tensor:
    base = _weight(fields)  # packed 4-bit storage has another shape
    return rows.new_empty(rows.shape[0], getattr(base, "out_features", 0) or base.weight.shape[0])


def _fake_grad_input(grad: Tensor, *fields: Any) -> Tensor:
    base = _weight(fields)
    return grad.new_empty(grad.shape[0], getattr(base, "in_features", 0) or base.weight.shape[1])


def _flops(rows: Tensor, *_fields: Any, out_val: Tensor, **_keywords: Any) -> int:
    return int(2 * rows.numel() * out_val.shape[1])


_products, _grad_inputs = (
    {
        fields.count(",") + 1: operator(
            function, fake=fake, flops=_flops, name=f"{function.__name__}_{kind}",
            signature=f"(Tensor rows, {fields}) -> Tensor",
        )
        for kind, fields in _KINDS.items()
    }
    for function, fake in ((lora_product, _fake_product), (lora_grad_input, _fake_grad_input))
)  # fmt: skip
_projections = {
    fields.count(",") + 1: differentiable(f"lora_base_{kind}", f"(Tensor rows, {fields}) -> Tensor", _BaseProduct)
    for kind, fields in _KINDS.items()
}
