"""The frozen weight under a LoRA adapter: dense, or 4-bit and dequantised once per use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


class BaseWeight(NamedTuple):
    """``BaseWeight(weight)`` is dense; with `absmax` it is bitsandbytes' 4-bit format, ``BaseWeight()`` is none.

    A flat tuple of tensors and constants, so that it passes through autograd functions and `torch.compile` as it is.
    """

    weight: Tensor | None = None
    """Dense: (out_features, in_features). 4-bit: bitsandbytes' packed storage."""
    absmax: Tensor | None = None
    """One scale per block: fp32, or uint8 where the scales are quantised themselves (double quantisation)."""
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_blocksize: int = 0
    blocksize: int = 0
    quant_type: str = ""
    """``nf4`` or ``fp4``."""
    out_features: int = 0
    in_features: int = 0
    dtype: torch.dtype = torch.float32
    """Of the values after dequantisation."""

    @property
    def present(self) -> bool:
        return self.weight is not None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(out_features, in_features) in `dtype`."""
        assert self.weight is not None
        if self.absmax is None:
            return self.weight.to(dtype)
        return _dequantised(*self).to(dtype)


def from_4bit(weight: Any) -> BaseWeight:
    """The parts of a bitsandbytes `Params4bit`, by reference: shapes as in `BaseWeight`."""
    state = weight.quant_state
    inner = state.state2 if state.nested else None
    return BaseWeight(
        weight=weight.data,
        absmax=state.absmax,
        nested_absmax=None if inner is None else inner.absmax,
        nested_code=None if inner is None else inner.code,
        nested_offset=None if inner is None else state.offset,
        nested_blocksize=0 if inner is None else inner.blocksize,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        out_features=state.shape[0],
        in_features=state.shape[1],
        dtype=state.dtype,
    )


def add_product(low: Tensor, rows: Tensor, base: BaseWeight) -> Tensor:
    """``low + rows W^T``, written over `low` except in a graph.

    Shapes: low (tokens, out_features), rows (tokens, in_features).
    """
    if base.absmax is None:
        assert base.weight is not None
        return accumulate(low, rows, base.weight.t())
    if not _observed():
        return accumulate(low, rows, _dequantised(*base).to(rows.dtype).t())
    out = low.clone() if torch.compiler.is_compiling() else low
    add_product_4bit(out, rows, *base)
    return out


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, written over `total` except in a graph, where the compiler decides what is."""
    if torch.compiler.is_compiling():
        return torch.addmm(total, left, right)
    # Not `addmm_`: FLOP counters know `addmm` alone.
    return torch.addmm(total, left, right, out=total)


def grad_input(grad: Tensor, base: BaseWeight) -> Tensor:
    """``grad W``, (tokens, in_features), for a gradient of shape (tokens, out_features)."""
    if base.absmax is None:
        assert base.weight is not None
        return grad.mm(base.weight)
    if _observed():
        return grad_input_4bit(grad, *base)
    return grad.mm(_dequantised(*base).to(grad.dtype))


def _observed() -> bool:
    """Whether something looks at operators: the compiler, a FLOP counter. Else their host time is saved."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _dequantised(
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    nested_blocksize: int,
    blocksize: int,
    quant_type: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    nested = {}
    if nested_absmax is not None:
        inner = QuantState(nested_absmax, code=nested_code, blocksize=nested_blocksize, dtype=torch.float32)
        nested = {"offset": nested_offset, "state2": inner}
    shape = torch.Size((out_features, in_features))
    state = QuantState(absmax, shape=shape, blocksize=blocksize, quant_type=quant_type, dtype=dtype, **nested)
    return dequantize_4bit(weight.view(-1, 1), state)


# Operators of their own for the compiler. Made of bitsandbytes' operators, the dequantisation of forward and of
# backward would be one common subexpression to it, and the dense weight of every layer would be saved.
@torch.library.custom_op("fastpack::add_product_4bit", mutates_args=("out",))
def add_product_4bit(
    out: Tensor,
    rows: Tensor,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    nested_blocksize: int,
    blocksize: int,
    quant_type: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    """``out += rows W^T`` with a 4-bit weight, dequantised for this use alone; arguments as `BaseWeight`."""
    dense = _dequantised(
        weight, absmax, nested_absmax, nested_code, nested_offset, nested_blocksize, blocksize, quant_type,
        out_features, in_features, dtype,
    )  # fmt: skip
    torch.addmm(out, rows, dense.to(rows.dtype).t(), out=out)


@torch.library.custom_op("fastpack::grad_input_4bit", mutates_args=())
def grad_input_4bit(
    grad: Tensor,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    nested_blocksize: int,
    blocksize: int,
    quant_type: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """``grad W`` with a 4-bit weight, dequantised for this use alone; (tokens, in_features)."""
    dense = _dequantised(
        weight, absmax, nested_absmax, nested_code, nested_offset, nested_blocksize, blocksize, quant_type,
        out_features, in_features, dtype,
    )  # fmt: skip
    return grad.mm(dense.to(grad.dtype))


@grad_input_4bit.register_fake
def _(grad: Tensor, *base: Any) -> Tensor:
    return grad.new_empty(grad.shape[0], BaseWeight(*base).in_features)


@register_flop_formula(torch.ops.fastpack.add_product_4bit)
def _flops_add(out_shape: Any, rows_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * out_shape[0] * out_shape[1] * rows_shape[1])


@register_flop_formula(torch.ops.fastpack.grad_input_4bit)
def _flops_grad(grad_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * grad_shape[0] * grad_shape[1] * out_shape[1])
