"""Adapters of projections that read one input, in the compute dtype as one pair of matrices.

The As lie below each other, the scaled Bs along a diagonal: one product with either is that of all. Cast for all layers
at once, by a few kernels for each shape of such a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.lora.adapters import add_up
from fastpack_trl.model.hooks import in_backward

Adapter = tuple[Tensor, Tensor, float]
"""A, B and the scaling of a projection."""


class JoinedCast(NamedTuple):
    """The adapters of sibling projections as their joint forward reads them."""

    a: Tensor
    """(sum of ranks, in_features) in the compute dtype."""
    b: Tensor
    """(sum of out_features, sum of ranks) in the compute dtype, times the scalings: blocks along the diagonal."""
    made_from: tuple[tuple[Tensor, Tensor, int, int, float], ...]
    """Of each projection as in `CastAdapter`."""
    spent: list[bool]
    """As in `CastAdapter`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model makes its own

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters that the cast stands for."""
        return tuple(parameter for made_from in self.made_from for parameter in made_from[:2])

    def serves(self, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> bool:
        """Return False: a projection by itself reads its own adapter."""
        return False

    def serves_all(self, adapters: Sequence[Adapter], dtype: torch.dtype) -> bool:
        """Return whether a cast of all would still give these tensors."""
        if self.a.dtype != dtype:
            return False
        for (a, b, scaling), (made_a, made_b, version_a, version_b, made_scaling) in zip(
            adapters, self.made_from, strict=True
        ):
            if a is not made_a or b is not made_b or scaling != made_scaling:
                return False
            if not torch.compiler.is_compiling() and (a._version, b._version) != (version_a, version_b):
                return False
        if torch.compiler.is_compiling():
            return torch.is_grad_enabled() or not self.spent
        return not self.spent or in_backward()


def cast_joined(
    groups: Sequence[Sequence[Any]], adapters: Sequence[Sequence[Adapter]], dtype: torch.dtype, *, adds_up: bool
) -> None:
    """Set ``module.fastpack_cast`` of all modules, one `JoinedCast` per group, as `adapters.cast_together` does.

    Args:
        groups: modules of projections that read one input.
        adapters: of each; parameters of one device and dtype.
        dtype: the compute dtype.
        adds_up: the backward pass adds to the gradients that are there.
    """
    alike: dict[Any, list[int]] = {}
    for index, group in enumerate(adapters):
        layout = tuple((a.shape, b.shape, scaling) for a, b, scaling in group)
        alike.setdefault((layout, adapters[index][0][0].dtype), []).append(index)
    for (layout, _), indices in alike.items():
        parameters = [tensor for index in indices for a, b, _ in adapters[index] for tensor in (a, b)]
        spent: list[bool] = []
        form = _Form(layout, dtype, len(indices))
        casts = _CastJoined.apply(form, spent, adds_up, *parameters)
        for number, index in enumerate(indices):
            made_from = tuple((a, b, a._version, b._version, scaling) for a, b, scaling in adapters[index])
            cast = JoinedCast(casts[2 * number], casts[2 * number + 1], made_from, spent)
            for module in groups[index]:
                module.__dict__["fastpack_cast"] = cast


class _Form:
    """The shapes of groups that are alike.

    Args:
        layout: shape of A, shape of B and scaling, of each projection of a group.
        dtype: of the casts.
        groups: how many.
    """

    def __init__(self, layout: Sequence[tuple[torch.Size, torch.Size, float]], dtype: torch.dtype, groups: int) -> None:
        self.dtype, self.groups, self.members = dtype, groups, len(layout)
        self.scalings = [scaling for _, _, scaling in layout]
        self.ranks = [shape[0] for shape, _, _ in layout]
        self.shape_a = (sum(self.ranks), layout[0][0][1])
        self.shape_b = (sum(shape[0] for _, shape, _ in layout), sum(self.ranks))
        ends, rows = list(accumulate(self.ranks)), list(accumulate(shape[0] for _, shape, _ in layout))
        self._columns = [slice(end - rank, end) for end, rank in zip(ends, self.ranks, strict=True)]
        self._rows = [slice(end - shape[0], end) for end, (_, shape, _) in zip(rows, layout, strict=True)]

    def filled(self, pair: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of one group; where one of the two was not asked for, it is zeros."""
        of_a, of_b = pair
        zeros = partial(like.new_zeros, dtype=self.dtype)
        return zeros(self.shape_a) if of_a is None else of_a, zeros(self.shape_b) if of_b is None else of_b

    def parts_of_a(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """Return the As of all groups, one after the other, as views of the joined ones."""
        return [part for each in joined for part in each.split(self.ranks)]

    def block(self, joined: Tensor, member: int) -> Tensor:
        """Return the Bs of one projection of all groups, (groups, out_features, rank), as a view of all joined ones."""
        return joined[:, self._rows[member], self._columns[member]]


class _CastJoined(torch.autograd.Function):
    """A and B of each group, joined; given A_1, B_1, A_2, B_2, ... of the first group, then of the next."""

    @staticmethod
    def forward(ctx: Any, form: _Form, spent: list[bool], adds_up: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.form, ctx.spent, ctx.adds_up, ctx.parameters = form, spent, adds_up, parameters
        ctx.set_materialize_grads(False)
        like, members = parameters[0], form.members
        # One allocation each: a gradient, and what is saved for it, belong to one layer.
        joined_a = [like.new_empty(form.shape_a, dtype=form.dtype) for _ in range(form.groups)]
        torch._foreach_copy_(form.parts_of_a(joined_a), list(parameters[::2]))
        stacked_b = like.new_zeros((form.groups, *form.shape_b), dtype=form.dtype)
        for member, scaling in enumerate(form.scalings):
            scaled = torch.stack(parameters[2 * member + 1 :: 2 * members])
            form.block(stacked_b, member).copy_(scaled if scaling == 1 else scaled.mul_(scaling))
        # Not views to autograd: of these, a write to the whole would be a write to each.
        joined_b = [each.detach() for each in stacked_b.unbind()]
        return tuple(tensor for pair in zip(joined_a, joined_b, strict=True) for tensor in pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.spent[:] = [True]
        form, parameters = ctx.form, ctx.parameters
        pairs = list(zip(grads[::2], grads[1::2], strict=True))
        present = [number for number, pair in enumerate(pairs) if pair != (None, None)]
        if not present:
            return (None, None, None, *[None] * len(parameters))
        filled = [form.filled(pairs[number], parameters[0]) for number in present]
        places = [2 * (number * form.members + member) for number in present for member in range(form.members)]
        gradients = {place: torch.empty_like(parameters[place]) for place in places}
        torch._foreach_copy_([gradients[place] for place in places], form.parts_of_a([of_a for of_a, _ in filled]))
        stacked = torch.stack([of_b for _, of_b in filled])
        dtype = parameters[0].dtype
        for member, scaling in enumerate(form.scalings):
            block = form.block(stacked, member).to(dtype, memory_format=torch.contiguous_format, copy=True)
            block = block if scaling == 1 else block.mul_(scaling)
            gradients |= {place + 1: each for place, each in zip(places[member :: form.members], block, strict=True)}
        if ctx.adds_up:
            add_up(parameters, gradients)
        # Gradients of their own: parts of one storage would count each other's edits, and keep each other alive.
        shared = [place for place in gradients if place % 2]
        own = [torch.empty_like(parameters[place]) for place in shared]
        if shared:
            torch._foreach_copy_(own, [gradients[place] for place in shared])
        gradients |= dict(zip(shared, own, strict=True))
        return (None, None, None, *[gradients.get(place) for place in range(len(parameters))])
