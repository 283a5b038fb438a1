"""The eager autograd nodes of LoRA projections: of several that read one tensor together, or of one.

The thin matmuls with the factors A of all are one, forward and backward, as are those of the gradients of A. Gradients
of the input, base and adapter, are accumulated by the matmuls in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.fp8 import quantize_rows
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input
from fastpack_trl.model.hooks import in_backward


class _Projections(torch.autograd.Function):
    """Project x by one weight or several; without `adds` compute the low-rank parts, to which `_AddBase` adds the base.

    Backward covers both. Arguments: x, dropped or None, the bases, whether they are added, then A of each, B of each,
    bias or None of each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Any, bases: list[Any], adds: bool, *factors: Any) -> tuple[Tensor, ...]:
        source, count = x if dropped is None else dropped, len(bases)
        rows, a, seconds = rows_of(source), stacked(factors[:count]), factors[count : 2 * count]
        reduced, quantized = rows.mm(a.t()), None
        if count > 1 and any(isinstance(base, Fp8Weight) for base in bases):
            quantized = quantize_rows(rows)
        ctx.ranks, outs = [b.shape[1] for b in seconds], []
        for base, b, bias, low in zip(
            bases, seconds, factors[2 * count :], parts_of(reduced, ctx.ranks, 1), strict=True
        ):
            outs.append(x.new_empty((*x.shape[:-1], b.shape[0])))
            # With `out=`: a selective checkpoint that keeps results of matmuls must not keep one that changes.
            total = rows_of(outs[-1])
            torch.mm(low, b.t(), out=total) if bias is None else torch.addmm(bias, low, b.t(), out=total)
            if adds:
                add_product(total, rows if dropped is None else rows_of(x), base, quantized)
        # The bases are not activations, so hooks on saved tensors (offloading, checkpoints) must not see them.
        ctx.bases, ctx.versions, ctx.is_dropped = bases, [version_of(base[0]) for base in bases], dropped is not None
        ctx.save_for_backward(source, reduced, a, *seconds)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, reduced, a, *seconds = ctx.saved_tensors
        needs_x, needs_dropped, _, _, *needs = ctx.needs_input_grad
        count, of_factors, through_base = len(seconds), [None] * len(needs), None
        # Not `None in grads`, which asks tensors whether they equal None: as long as three launches.
        is_whole = all(grad is not None for grad in grads)
        thin = torch.empty_like(reduced) if is_whole else torch.zeros_like(reduced)
        lows, thins = parts_of(reduced, ctx.ranks, 1), parts_of(thin, ctx.ranks, 1)
        for index, (grad, b, base) in enumerate(zip(grads, seconds, ctx.bases, strict=True)):
            if version_of(base[0]) != ctx.versions[index]:
                raise RuntimeError(
                    "a frozen weight under LoRA was changed in place between forward and backward (version "
                    f"{ctx.versions[index]} -> {version_of(base[0])}): change it before the forward or after the "
                    "backward"
                )
            if grad is None:
                continue
            grad = rows_of(grad.contiguous())
            torch.mm(grad, b, out=thins[index])
            if needs_x:
                through_base = grad_input(grad, base, through_base)
            if needs[count + index]:
                of_factors[count + index] = grad.t().mm(lows[index])
            if needs[2 * count + index]:
                of_factors[2 * count + index] = grad.sum(0)
        if any(needs[:count]):
            for index, grad_a in enumerate(parts_of(thin.t().mm(rows_of(source)), ctx.ranks)):
                if needs[index] and grads[index] is not None:
                    of_factors[index] = grad_a
        grad_dropped = thin.mm(a).view(source.shape) if ctx.is_dropped and needs_dropped else None
        if through_base is not None:
            if not ctx.is_dropped:
                torch.addmm(through_base, thin, a, out=through_base)
            through_base = through_base.view(source.shape)
        return through_base, grad_dropped, None, None, *of_factors


class _AddBase(torch.autograd.Function):
    """Adds ``x W^T`` to the low-rank part, in place; the gradient passes through.

    A node of its own in a recompute, after all is saved: that of a layer's last projection ends before this matmul,
    because non-reentrant checkpoints end early.
    """

    @staticmethod
    def forward(ctx: Any, low: Tensor, x: Tensor, base: BaseWeight | Fp8Weight) -> Tensor:
        ctx.mark_dirty(low)
        add_product(low.view(-1, low.shape[-1]), rows_of(x), base)
        return low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def project(x: Tensor, parts: Sequence[Any], dropped: Tensor | None = None) -> list[Tensor]:
    """Return ``bias + x W^T + (x A^T) B^T`` of each of `parts` (base, A, B, bias), (..., out_features).

    With `dropped`, the input of the adapter in place of x, there must be one part.
    """
    bases, *factors = ([*each] for each in zip(*(part[:4] for part in parts), strict=True))
    adds = len(bases) > 1 or not in_backward()
    outs = _Projections.apply(x, dropped, bases, adds, *(factor for each in factors for factor in each))
    return [*outs] if adds else [_AddBase.apply(outs[0], x, bases[0])]


def stacked(factors: Sequence[Tensor]) -> Tensor:
    """Return matrices of one width below each other: by reference if they lie so in one buffer, as casts do."""
    first, rows = factors[0].detach(), sum(factor.shape[0] for factor in factors)
    storage, place = first.untyped_storage()._cdata, first.storage_offset()
    for factor in factors if len(factors) > 1 else ():
        if (factor.untyped_storage()._cdata, factor.storage_offset()) != (storage, place) or not factor.is_contiguous():
            return torch.cat([each.detach() for each in factors])
        place += factor.numel()
    return first if len(factors) == 1 else first.as_strided((rows, first.shape[1]), first.stride())


def parts_of(x: Tensor, sizes: list[int], dim: int = 0) -> Sequence[Tensor]:
    """Return views of these sizes; of one x itself, for which the host makes no view."""
    return (x,) if len(sizes) == 1 else x.split_with_sizes(sizes, dim)


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
