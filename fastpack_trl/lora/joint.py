"""LoRA projections of one tensor (q, k, v; gate, up) computed together, without replacing the forward that calls them.

One thin matmul with the factors A of all, forward and backward, one for their gradients; the gradients of the input
meet in the products. The first that is called computes all; the others return what it kept if they get the very same
tensor. Which layers read one tensor is learned from the first forward of the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.fp8 import quantize_rows
from fastpack_trl.lora.adapters import autocasts, is_sharded
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, add_product, grad_input
from fastpack_trl.lora.projection import add_thin_gradient, check_version, rows_of, thin_product, version_of
from fastpack_trl.model.hooks import in_backward

_USUAL = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkvz", "in_proj_ba"), ("wi_0", "wi_1")),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Names of layers that usually read one tensor, in the order of their calls. The first forward confirms or corrects
them; the right guess makes its roundings those of later forwards."""


class Part(NamedTuple):
    """Tensors and constants of one call of a projection, in its compute dtype."""

    frozen: BaseWeight | Fp8Weight | None
    """The base weight; None for 8 bits, which bitsandbytes multiplies."""
    a: Tensor
    b: Tensor
    bias: Tensor | None
    dropout: nn.Module | None
    """None if it drops nothing."""
    dtype: torch.dtype
    result: torch.dtype

    def can_join(self, x: Tensor) -> bool:
        """Return whether the projection can share an autograd node with others of `x`."""
        if self.frozen is None or self.dropout is not None or is_sharded(self.a) or is_sharded(self.frozen.weight):
            return False
        return x.requires_grad or self.a.requires_grad or self.b.requires_grad


def joint_projection(x: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Return ``x W^T + bias + (x A^T) B^T`` of each part, (..., out_features); all dtypes are that of `x`."""
    firsts, seconds, biases = ([getattr(part, name) for part in parts] for name in ("a", "b", "bias"))
    return list(_Joint.apply(x, [part.frozen for part in parts], *firsts, *seconds, *biases))


class _Joint(torch.autograd.Function):
    """Project x (..., in_features) by several weights; saves x, ``x A^T`` (tokens, sum of ranks), A and B of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bases: list[Any], *factors: Tensor | None) -> tuple[Tensor, ...]:
        rows, count = rows_of(x), len(bases)
        a, seconds, biases = stacked(factors[:count]), factors[count : 2 * count], factors[2 * count :]
        reduced = rows.mm(a.t())
        quantized = quantize_rows(rows) if any(isinstance(base, Fp8Weight) for base in bases) else None
        outs = []
        ctx.ranks = [b.shape[1] for b in seconds if b is not None]
        for base, b, bias, low in zip(bases, seconds, biases, reduced.split(ctx.ranks, 1), strict=True):
            assert b is not None
            outs.append(x.new_empty(*x.shape[:-1], b.shape[0]))
            # With `out=`: a selective checkpoint that keeps results of matmuls must not keep one that changes.
            total = thin_product(low, b, bias, out=rows_of(outs[-1]))
            add_product(total, rows, base, quantized)
        # The bases are not activations, so hooks on saved tensors (offloading, checkpoints) must not see them.
        ctx.bases, ctx.versions = bases, [version_of(base.weight) for base in bases]
        ctx.save_for_backward(x, reduced, a, *seconds)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, reduced, a, *seconds = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        count, rows = len(seconds), rows_of(x)
        of_factors: list[Tensor | None] = [None] * (3 * count)
        grad_reduced = torch.zeros_like(reduced) if None in grads else torch.empty_like(reduced)
        grad_x: Tensor | None = None
        lows = zip(reduced.split(ctx.ranks, 1), grad_reduced.split(ctx.ranks, 1), strict=True)
        for index, (grad, b, base, (low, grad_low)) in enumerate(zip(grads, seconds, ctx.bases, lows, strict=True)):
            check_version(base.weight, ctx.versions[index])
            if grad is None:
                continue
            grad = rows_of(grad.contiguous())
            torch.mm(grad, b, out=grad_low)
            if needs_x:
                grad_x = grad_input(grad, base, grad_x)
            of_factors[count + index] = grad.t().mm(low) if needs[count + index] else None
            of_factors[2 * count + index] = grad.sum(0) if needs[2 * count + index] else None
        if any(needs[:count]):
            for index, grad_a in enumerate(grad_reduced.t().mm(rows).split(ctx.ranks)):
                of_factors[index] = grad_a if needs[index] and grads[index] is not None else None
        if grad_x is not None:
            grad_x = add_thin_gradient(grad_x, grad_reduced, a).view(x.shape)
        return grad_x, None, *of_factors


def stacked(factors: Sequence[Any]) -> Tensor:
    """Return matrices of one width below each other: by reference if they lie so in one buffer (`adapters`)."""
    first, place = factors[0].detach(), 0
    storage, rows = first.untyped_storage()._cdata, sum(factor.shape[0] for factor in factors)
    for factor in factors:
        is_next = factor.is_contiguous() and factor.untyped_storage()._cdata == storage
        if not (is_next and factor.storage_offset() == first.storage_offset() + place):
            return torch.cat([each.detach() for each in factors])
        place += factor.numel()
    return first.as_strided((rows, first.shape[1]), first.stride())


class Kept:
    """Outputs that siblings have not asked for yet: of one group at a time, and of the present forward.

    Attributes:
        forward: number of forwards of the backbone that began with gradients.
        since: autograd's sequence number at the beginning of the forward.
    """

    def __init__(self) -> None:
        self.forward, self.since = 0, 0
        self._leaf: Any = torch.zeros(0, requires_grad=True)
        self._set({}, _never, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def begin(self) -> None:
        """Begin a forward of the backbone; drop what one that raised has left, with its graph."""
        self._set({}, _never, None)
        self.forward += 1
        self.since = self._leaf.view(0).grad_fn._sequence_nr()

    def put(self, outputs: dict[Any, Tensor], reads: Callable[[Tensor], bool], owner: Siblings | None) -> None:
        """Keep outputs for a tensor; `owner` has failed if not all are asked for (None: a recompute)."""
        self.drop()
        self._set(outputs, reads, owner)

    def drop(self) -> None:
        """Drop outputs that nobody asked for."""
        if self.outputs and self._owner is not None:
            self._owner.has_failed = True
        self._set({}, _never, None)

    def _set(self, outputs: dict[Any, Tensor], reads: Callable[[Tensor], bool], owner: Siblings | None) -> None:
        self.outputs, self.reads, self._owner = outputs, reads, owner


class Siblings:
    """LoRA layers of one parent with inputs of one width, of which those that read one tensor are computed together.

    A recompute in a backward pass gets the plan of its forward, because a checkpoint compares what both save.

    Attributes:
        has_failed: a layer that was computed ahead got another tensor, or was not called: all are computed alone.
    """

    def __init__(self, kept: Kept, layers: Mapping[str, Any]) -> None:
        self.kept, self.has_failed, self._forward = kept, False, 0
        usual = [[layers[name] for name in names if name in layers] for names in _USUAL]
        self._plans = [(-1, _plan_of(usual))]
        self._runs: list[list[Any]] | None = []
        self._last: Callable[[Tensor], bool] = _never

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the layers of a copy are computed alone

    @property
    def is_joint(self) -> bool:
        """Whether any of the layers are computed together."""
        return bool(self._plans[-1][1])

    def output(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return the output of a layer for `x`; None if it must be computed alone. Called with gradients only."""
        kept, recomputes = self.kept, in_backward()
        if not recomputes:
            self._observe(layer, x)
        if layer in kept.outputs:
            if kept.reads(x):
                return kept.outputs.pop(layer)
            kept.drop()
        run = self._plan(recomputes).get(layer, ())
        parts = {each: part for each in run if (part := each.fastpack_part(x)) is not None and part.can_join(x)}
        if len(parts) < 2 or layer not in parts:
            return None
        dtype = parts[layer].dtype
        outs = joint_projection(x if x.dtype == dtype else x.to(dtype), [*parts.values()])
        outputs = {each: out.to(part.result) for (each, part), out in zip(parts.items(), outs, strict=True)}
        first = outputs.pop(layer)
        kept.put(outputs, _same(x), None if recomputes else self)
        return first

    def _plan(self, recomputes: bool) -> dict[Any, list[Any]]:
        # The node that runs belongs to the forward that is recomputed.
        node = torch._C._current_autograd_node() if recomputes else None
        if node is None:
            return self._plans[-1][1]
        return next(plan for since, plan in reversed(self._plans) if since <= node._sequence_nr())

    def _observe(self, layer: Any, x: Tensor) -> None:
        """Learn from the first forward which layers read one tensor; change the plan only between forwards."""
        if self._forward != self.kept.forward:
            self._forward = self.kept.forward
            if self._runs or (self._runs is None and self.has_failed):
                plan = _plan_of(self._runs or ())
                self._runs, self.has_failed = None, self._runs is None
                if plan != self._plans[-1][1]:
                    self._plans.append((self.kept.since, plan))
        if self._forward and self._runs is not None and not any(layer in run for run in self._runs):
            if not self._last(x):
                self._runs.append([])
                self._last = _same(x)
            self._runs[-1].append(layer)


def find_siblings(names: Sequence[str], layers: Sequence[Any], kept: Kept) -> list[Siblings]:
    """Set ``layer.fastpack_siblings`` of each of `layers` that has others in its parent with inputs of its width."""
    groups: dict[Any, dict[str, Any]] = {}
    for path, layer in zip(names, layers, strict=True):
        parent, _, name = path.rpartition(".")
        groups.setdefault((parent, layer.in_features), {})[name] = layer
    result = [(Siblings(kept, group), group) for group in groups.values() if len(group) > 1]
    for siblings, group in result:
        for layer in group.values():
            layer.__dict__["fastpack_siblings"] = siblings
    return [siblings for siblings, _ in result]


def _plan_of(runs: Iterable[list[Any]]) -> dict[Any, list[Any]]:
    """Return a layer and those called after it with its input, by layer; without layers that are called alone."""
    return {layer: run[index:] for run in runs for index, layer in enumerate(run[:-1])}


def _never(_: Tensor) -> bool:
    return False


def _same(x: Tensor) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a tensor is `x`, unchanged and under the same autocast; keeps no tensor."""
    tensor, version, cast = ref(x), version_of(x), autocasts(x.device.type)
    return lambda other: other is tensor() and version_of(other) == version and autocasts(other.device.type) == cast
