"""One LoRA projection as two autograd functions: ``bias + (x A^T) B^T`` first, the base product accumulated into it.

Two, because of activation checkpointing: the first saves all that backward needs, so the recompute of a layer's last
projection stops before the base product (non-reentrant checkpoints end early). The first function's backward makes the
whole gradient of the input, the base's part and the adapter's part in one buffer.

Shapes: x (..., in_features); a (rank, in_features); b (out_features, rank), the scaling multiplied into it; all in one
dtype. Source of the computation: Hu et al., LoRA, arXiv:2106.09685, section 4.1; Dettmers et al., QLoRA,
arXiv:2305.14314, equation 5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input
from fastpack_trl.lora.operators import add_thin_gradient, fp8_projection, projection_gradients, thin_product
from fastpack_trl.lora.operators import lora_projection as projection_operator

_SMALL = {False: 1 << 16, True: 1 << 22}
"""Elements of the input, on the CPU and on CUDA, up to which a step waits for the host: two Python functions per
projection cost more time there (about 80 us, forward and backward each) than an addition of such a tensor."""


def lora_projection(
    x: Tensor,
    base: BaseWeight | Fp8Weight,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    dropped: Tensor | None = None,
) -> Tensor:
    """Return ``x W^T + bias + (x A^T) B^T``; saves x, x A^T and the adapter for backward, nothing of the base.

    Args:
        x: (..., in_features).
        base: the frozen weight, (out_features, in_features), 4-bit, or in FP8: then x is quantised for its product,
            and so is the gradient.
        a: (rank, in_features).
        b: (out_features, rank), times the scaling.
        bias: (out_features,) or None.
        dropped: what the adapter reads in place of x where dropout is on, shape of x.

    Returns:
        (..., out_features), contiguous, dtype of x.
    """
    if torch.compiler.is_compiling():
        return _traced(x, base, a, b, bias, dropped)
    if isinstance(base, BaseWeight) and base.absmax is None and x.numel() <= _SMALL[x.is_cuda]:
        return _by_torch(x, base, a, b, bias, dropped)
    low = _LowRank.apply(x, dropped, a, b, bias, base)
    out: Tensor = _AddBase.apply(low, x, base)
    return out


def _traced(
    x: Tensor, base: BaseWeight | Fp8Weight, a: Tensor, b: Tensor, bias: Tensor | None, dropped: Tensor | None
) -> Tensor:
    """Project in a graph: the thin product by itself, so that a recompute may make it without the base's."""
    rows = _rows(x)
    source = None if dropped is None else _rows(dropped)
    reduced = (rows if source is None else source).detach().mm(a.detach().t())
    operator = fp8_projection if isinstance(base, Fp8Weight) else projection_operator
    out: Tensor = operator(rows, source, reduced, a, b, bias, *base)
    return out.view(*x.shape[:-1], b.shape[0])


def _by_torch(x: Tensor, base: BaseWeight, a: Tensor, b: Tensor, bias: Tensor | None, dropped: Tensor | None) -> Tensor:
    """Project by torch's own nodes: one more addition in backward, and a fraction of the host time.

    On rows from the beginning: each product of a tensor of three dimensions is two views more, forward and backward.
    """
    rows = _rows(x)
    low = F.linear(F.linear(rows if dropped is None else _rows(dropped), a), b, bias)
    # Not in place: selective checkpoints keep the results of products.
    return torch.addmm(low, rows, base.weight.t()).view(*x.shape[:-1], b.shape[0])


class _LowRank(torch.autograd.Function):
    """``bias + (x A^T) B^T``; the backward of the whole projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        base: BaseWeight | Fp8Weight,
    ) -> Tensor:
        source = x if dropped is None else dropped
        reduced = _rows(source).mm(a.t())
        low = thin_product(reduced, b, bias)
        ctx.save_for_backward(source, reduced, a, b)
        # The base is no activation: hooks on saved tensors (offloading, checkpoints) have no business with it.
        ctx.base, ctx.dropped = base, dropped is not None
        ctx.version = _version(base.weight)
        return torch.ops.aten._unsafe_view(low, (*x.shape[:-1], b.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        source, reduced, a, b = ctx.saved_tensors
        if _version(ctx.base.weight) != ctx.version:
            raise RuntimeError(
                "a frozen weight under LoRA was changed in place between forward and backward (version "
                f"{ctx.version} -> {_version(ctx.base.weight)}): change it before the forward or after the backward"
            )
        grad = _rows(grad_out)
        through_base = partial(_grad_through_base, grad, ctx.base)
        grad_x, grad_dropped, *grads = projection_gradients(
            grad, _rows(source), reduced, a, b, ctx.needs_input_grad[:5], through_base, dropped=ctx.dropped
        )
        shaped = [None if each is None else each.view(source.shape) for each in (grad_x, grad_dropped)]
        return *shaped, *grads, None


def _grad_through_base(
    grad: Tensor, base: BaseWeight | Fp8Weight, grad_reduced: Tensor | None, a: Tensor | None
) -> Tensor:
    return add_thin_gradient(grad_input(grad, base), grad_reduced, a)


class _AddBase(torch.autograd.Function):
    """Adds ``x W^T`` to the output of `_LowRank`, in place; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, low: Tensor, x: Tensor, base: BaseWeight | Fp8Weight) -> Tensor:
        ctx.mark_dirty(low)
        add_product(low.view(-1, low.shape[-1]), _rows(x), base)
        return low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return grad_out, None, None


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
