"""The LoRA projections of one input, such as q, k and v, in fewer products; each has an output of its own.

Adapters are joined as in `joined_casts`. Forward: one product with all As, then per projection its B and its base.
Backward: one product each for the gradients of all As and all Bs and for what comes through them, and all bases and
the As add to one gradient of the input. For q, k and v that are 14 products instead of 24.

Shapes: x (..., in_features); a (sum of ranks, in_features); b (sum of out_features, sum of ranks), blocks along the
diagonal; weight (out_features, in_features) and bias (out_features,) of each projection, frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import differentiable, operator


def joined_projection(
    x: Tensor, weights: Sequence[Tensor], a: Tensor, b: Tensor, ranks: Sequence[int], biases: Sequence[Tensor | None],
    *, by_torch: bool,
) -> list[Tensor]:  # fmt: skip
    """Return ``x W^T + bias + (x A^T) B^T`` of each projection, (..., out_features), contiguous.

    Args:
        x: (..., in_features).
        weights: of each projection.
        a: all As, one below the other.
        b: all Bs, along a diagonal.
        ranks: rows of `a` that are of each projection.
        biases: of each projection; all of them, or none.
        by_torch: where the host is what a step waits for: torch's own nodes, and one more addition in backward.
    """
    rows = x.reshape(-1, x.shape[-1])
    bias = None if biases[0] is None else torch.cat([each for each in biases if each is not None])
    if by_torch:
        low = F.linear(F.linear(rows, a), b, bias).split([weight.shape[0] for weight in weights], dim=1)
        # Not in place: selective checkpoints keep the results of products.
        outs = [torch.addmm(part, rows, weight.t()) for part, weight in zip(low, weights, strict=True)]
    else:
        reduced = rows.detach().mm(a.detach().t())
        joined = joined_operator if torch.compiler.is_compiling() else _Joined.apply
        outs = joined(rows, reduced, a, b, bias, list(weights), list(ranks))
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]


def joined_product(
    rows: Tensor, reduced: Tensor, b: Tensor, bias: Tensor | None, weights: list[Tensor], ranks: list[int]
) -> list[Tensor]:
    """Return ``bias + reduced B^T + rows W^T`` of each projection, the second product accumulated into the first.

    Shapes: rows (tokens, in_features), reduced = ``rows A^T``, (tokens, sum of ranks), bias (sum of out_features,).
    """
    outs = []
    for weight, end, rank, last in zip(weights, accumulate(_heights(weights)), ranks, accumulate(ranks), strict=True):
        own, columns = slice(end - weight.shape[0], end), slice(last - rank, last)
        factors = reduced[:, columns], b[own, columns].t()
        low = factors[0].mm(factors[1]) if bias is None else torch.addmm(bias[own], *factors)
        outs.append(torch.addmm(low, rows, weight.t(), out=low))
    return outs


def joined_grad_input(grad: Tensor, grad_reduced: Tensor, a: Tensor, weights: list[Tensor]) -> Tensor:
    """Return ``grad W + grad_reduced A``, summed over the projections, in one buffer.

    Shapes: grad (tokens, sum of out_features), grad_reduced (tokens, sum of ranks); returns (tokens, in_features).
    """
    first, *others = grad.split(_heights(weights), dim=1)
    total = first.mm(weights[0])
    for part, weight in zip(others, weights[1:], strict=True):
        torch.addmm(total, part, weight, out=total)
    return torch.addmm(total, grad_reduced, a, out=total)


def _heights(weights: Sequence[Tensor]) -> list[int]:
    return [weight.shape[0] for weight in weights]


def _fake_product(
    rows: Tensor, reduced: Tensor, b: Tensor, bias: Any, weights: list[Tensor], ranks: Any
) -> list[Tensor]:
    return [reduced.new_empty(rows.shape[0], weight.shape[0]) for weight in weights]


def _fake_grad_input(grad: Tensor, grad_reduced: Tensor, a: Tensor, weights: list[Tensor]) -> Tensor:
    return grad.new_empty(grad.shape[0], weights[0].shape[1])


def _flops_product(
    rows: Tensor, reduced: Tensor, b: Tensor, bias: Any, weights: list[Tensor], ranks: list[int], **kwargs: Any
) -> int:
    wide = sum(weight.shape[0] * (weight.shape[1] + rank) for weight, rank in zip(weights, ranks, strict=True))
    return int(2 * rows.shape[0] * wide)


def _flops_grad_input(grad: Tensor, grad_reduced: Tensor, a: Tensor, weights: list[Tensor], **kwargs: Any) -> int:
    return int(2 * grad.shape[0] * a.shape[1] * (grad.shape[1] + grad_reduced.shape[1]))


_product = operator(
    joined_product, fake=_fake_product, flops=_flops_product,
    signature="(Tensor rows, Tensor reduced, Tensor b, Tensor? bias, Tensor[] weights, SymInt[] ranks) -> Tensor[]",
)  # fmt: skip
_grad_input = operator(
    joined_grad_input, fake=_fake_grad_input, flops=_flops_grad_input,
    signature="(Tensor grad, Tensor grad_reduced, Tensor a, Tensor[] weights) -> Tensor",
)  # fmt: skip


class _Joined(torch.autograd.Function):
    """``rows, reduced, a, b, bias or None, weights, ranks``; `reduced` is made outside, the derivative is of all."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        reduced: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        weights: list[Tensor],
        ranks: list[int],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, reduced, a, b)
        # Frozen weights are no activations: hooks on saved tensors (offloading, checkpoints) must not see them.
        ctx.weights, ctx.versions = weights, [_version(weight) for weight in weights]
        return tuple(_product(rows, reduced, b, bias, weights, ranks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, reduced, a, b = ctx.saved_tensors
        versions = [_version(weight) for weight in ctx.weights]
        if versions != ctx.versions:
            raise RuntimeError(
                "a frozen weight under LoRA was changed in place between forward and backward (version "
                f"{ctx.versions} -> {versions}): change it before the forward or after the backward"
            )
        needs_rows, _, needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        grad = torch.cat(grads, dim=1)
        grad_reduced = grad.mm(b)
        return (
            _grad_input(grad, grad_reduced, a, ctx.weights) if needs_rows else None,
            None,
            grad_reduced.t().mm(rows) if needs_a else None,
            grad.t().mm(reduced) if needs_b else None,
            grad.sum(0) if needs_bias else None,
            None,
            None,
        )


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


joined_operator = differentiable(
    "lora_joined_projection",
    "(Tensor rows, Tensor reduced, Tensor a, Tensor b, Tensor? bias, Tensor[] weights, SymInt[] ranks) -> Tensor[]",
    _Joined,
)
