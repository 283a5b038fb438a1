"""The two products of a LoRA projection as operators, for graphs.

A compiler that is given ``addmm`` copies the addend before the product, and one that is given bitsandbytes' operators
sees the dequantisations of forward and backward as one common subexpression and saves the dense weight of every layer.
These operators hide both. They are registered without an autograd layer: `projection.py` has the derivative.
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
_library.define(f"lora_product(Tensor rows, Tensor reduced, Tensor b, Tensor? bias, {_BASE}) -> Tensor")
_library.define(f"lora_grad_input(Tensor grad, Tensor grad_reduced, Tensor a, {_BASE}) -> Tensor")


def product(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any) -> Tensor:
    """``bias + reduced B^T + rows W^T``, the second product accumulated into the first.

    Shapes: rows (tokens, in_features), reduced (tokens, rank), b (out_features, rank), bias (out_features,); returns
    (tokens, out_features).
    """
    low = reduced.mm(b.t()) if bias is None else torch.addmm(bias, reduced, b.t())
    return add_product(low, rows, BaseWeight(*base))


def input_gradient(grad: Tensor, grad_reduced: Tensor, a: Tensor, *base: Any) -> Tensor:
    """``grad W + grad_reduced A``, the second product accumulated into the first.

    Shapes: grad (tokens, out_features), grad_reduced (tokens, rank), a (rank, in_features); returns (tokens,
    in_features).
    """
    total = grad_input(grad, BaseWeight(*base))
    return torch.addmm(total, grad_reduced, a, out=total)


_library.impl("lora_product", product, "CompositeExplicitAutograd")
_library.impl("lora_grad_input", input_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("fastpack::lora_product", lib=_library)
def _(rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, *base: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], b.shape[0])


@torch.library.register_fake("fastpack::lora_grad_input", lib=_library)
def _(grad: Tensor, grad_reduced: Tensor, a: Tensor, *base: Any) -> Tensor:
    return grad.new_empty(grad.shape[0], a.shape[1])


@register_flop_formula(torch.ops.fastpack.lora_product)
def _flops(rows_shape: Any, reduced_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * rows_shape[0] * b_shape[0] * (rows_shape[1] + b_shape[1]))


@register_flop_formula(torch.ops.fastpack.lora_grad_input)
def _flops_backward(grad_shape: Any, grad_reduced_shape: Any, a_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * grad_shape[0] * a_shape[1] * (grad_shape[1] + a_shape[0]))
