"""The experts block as operators, for compiled graphs: `torch.compile` neither looks inside nor breaks there.

Eager code takes `ExpertsFunction`, which has less overhead. A gate of the model's own cannot be part of an operator.
Stacks in four bits have operators of their own, which make them dense inside: a graph that saw it would keep the dense
stack of every layer for its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.dequantise import Scales
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.moe.experts import BlockForm, ExpertWeights, Kept, experts_backward, experts_forward
from fastpack_trl.moe.quantised import Layout, Packed
from fastpack_trl.moe.routing import RoutingPlan

_INPUTS, _PLAN, _BLOCK = 2, 4, len(ExpertWeights._fields)
_TENSORS = _INPUTS + _PLAN + _BLOCK
_SCALES = len(Scales._fields)


class _Form(NamedTuple):
    """The fields of a `BlockForm` but for packed stacks, as constants of an operator."""

    kind: str
    interleaved: bool
    alpha: float
    limit: float
    transposed: bool
    gate_up_scale: float
    down_scale: float

    def block_form(self, gate_up: Packed | None, down: Packed | None) -> BlockForm:
        gate = Gate(cast("Any", self.kind), self.interleaved, self.alpha, self.limit)
        return BlockForm(gate, self.transposed, self.gate_up_scale, self.down_scale, gate_up, down)


class _Call(NamedTuple):
    """One call of the block."""

    hidden: Tensor
    """(T, H)."""
    weights: Tensor
    """(T, k) routing weights."""
    plan: RoutingPlan
    block: ExpertWeights
    form: BlockForm

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> _Call:
        """Read the arguments of an operator, flat.

        They are the input, the weights, the plan, the block, the scales of both stacks where these are packed, their
        layouts, and the form.
        """
        given = iter(arguments)
        hidden, weights = next(given), next(given)
        plan, block = RoutingPlan(*islice(given, _PLAN)), ExpertWeights(*islice(given, _BLOCK))
        up = down = None
        if len(arguments) > _TENSORS + len(_Form._fields):
            scales = [Scales(*islice(given, _SCALES)) for _ in range(2)]
            layouts = [Layout(*islice(given, len(Layout._fields))) for _ in range(2)]
            up, down = map(Packed.of, scales, layouts)
        return cls(hidden, weights, plan, block, _Form(*given).block_form(up, down))

    def stack_shapes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of both dense stacks, (E, ., .)."""
        block, (up, down) = self.block, (self.form.gate_up_packed, self.form.down_packed)
        return (
            block.gate_up.shape if up is None else tuple(up.state.shape),
            block.down.shape if down is None else tuple(down.state.shape),
        )

    def product_flops(self, *shapes: Sequence[int]) -> int:
        """Return the operations of every routed row times its matrix, of each stack."""
        return sum(2 * self.plan.perm.shape[0] * shape[1] * shape[2] for shape in shapes)

    def flops(self) -> int:
        """Return the operations of every routed row times its matrices."""
        factors = [factor.shape for factor in self.block[len(self.block) // 2 :] if factor is not None]
        return self.product_flops(*self.stack_shapes(), *factors)


def experts_in_graph(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm
) -> Tensor:
    """Run `fastpack_trl.moe.experts.experts` as one node of a graph, with one node for its backward."""
    gate, up, down = form.gate, form.gate_up_packed, form.down_packed
    arguments = (hidden_th, weights_tk, *plan.tensors(), *block)
    constants = (
        gate.kind, gate.interleaved, gate.alpha, gate.limit, form.transposed, form.gate_up_scale, form.down_scale
    )  # fmt: skip
    out: Tensor
    if up is None or down is None:
        out, *_ = _experts(*arguments, *constants)
    else:
        (up_scales, up_layout), (down_scales, down_layout) = up.parts(), down.parts()
        out, *_ = _experts_4bit(*arguments, *up_scales, *down_scales, *up_layout, *down_layout, *constants)
    return out


def experts(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output (T, H), then the fields of `Kept`; an empty tensor for one that is None."""
    call = _Call.of(arguments)
    out, kept = experts_forward(call.hidden, call.weights, call.plan, call.block, call.form)
    up, low = (kept.h.new_empty(0) if value is None else value for value in kept[1:])
    return out, kept.h, up, low


def experts_gradients(
    grad: Tensor, pre_activation: Tensor, low_up: Tensor, low_down: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """Return the gradients that are needed, in order: hidden, weights, then the tensors of the block."""
    call = _Call.of(arguments)
    kept = Kept(
        pre_activation,
        None if call.block.gate_up_a is None else low_up,
        None if call.block.down_a is None else low_down,
    )
    grads = experts_backward(grad, call.hidden, call.weights, kept, call.plan, call.block, call.form, tuple(needed))
    return [value.contiguous() for value, need in zip(grads, needed, strict=True) if need and value is not None]


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call.of(arguments)
    stored, packed, slots = call.block.gate_up, call.form.gate_up_packed, call.plan.perm.shape[0]
    dtype = stored.dtype if packed is None else packed.dtype
    width = call.stack_shapes()[0][2 if call.form.transposed else 1]
    up, low = (
        stored.new_empty(0, dtype=dtype) if a is None else stored.new_empty(slots, a.shape[1], dtype=dtype)
        for a in (call.block.gate_up_a, call.block.down_a)
    )
    return torch.empty_like(call.hidden), stored.new_empty(slots, width, dtype=dtype), up, low


def _fake_gradients(
    _grad: Tensor, _pre_activation: Tensor, _up: Tensor, _down: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    call = _Call.of(arguments)
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        for value, need in zip((call.hidden, call.weights, *call.block), needed, strict=True)
        if need and value is not None
    ]


def _flops(*arguments: Any, **_keywords: Any) -> int:
    return _Call.of(arguments).flops()


def _flops_gradients(
    _grad: Tensor, _pre_activation: Tensor, _up: Tensor, _down: Tensor, needed: Sequence[bool], *arguments: Any,
    **_keywords: Any,
) -> int:  # fmt: skip
    """Count the products of the input's gradient, and of the weight gradients that are needed."""
    call = _Call.of(arguments)
    need_hidden, _, *need_block = needed
    trained = [
        value.shape
        for value, need in zip(call.block, need_block, strict=True)
        if need and value is not None and value.ndim == 3
    ]
    through_gate_up = 0 if need_hidden else call.product_flops(call.stack_shapes()[0])
    return call.flops() - through_gate_up + call.product_flops(*trained)


_ARGUMENTS = ", ".join(("Tensor hidden, Tensor weights", *map(arguments_of, (RoutingPlan, ExpertWeights))))
_STACKS = ", ".join(arguments_of(kind, prefix) for kind in (Scales, Layout) for prefix in ("up_", "down_"))
_DENSE = f"{_ARGUMENTS}, {arguments_of(_Form)}"
_PACKED = f"{_ARGUMENTS}, {_STACKS}, {arguments_of(_Form)}"
_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
_GRADIENT = "Tensor grad, Tensor pre_activation, Tensor low_up, Tensor low_down, bool[] needed"


def experts_4bit(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `experts` over packed stacks."""
    return experts(*arguments)


def experts_4bit_gradients(*arguments: Any) -> list[Tensor]:
    """Run `experts_gradients` over packed stacks."""
    return experts_gradients(*arguments)


_forward = operator(experts, fake=_fake, flops=_flops, signature=f"({_DENSE}) -> {_RESULTS}")
_forward_4bit = operator(experts_4bit, fake=_fake, flops=_flops, signature=f"({_PACKED}) -> {_RESULTS}")
_backward, _backward_4bit = (
    operator(
        function, fake=_fake_gradients, flops=_flops_gradients, signature=f"({_GRADIENT}, {arguments}) -> Tensor[]"
    )
    for function, arguments in ((experts_gradients, _DENSE), (experts_4bit_gradients, _PACKED))
)


class _ExpertsInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.packed = len(arguments) > _TENSORS + len(_Form._fields)
        out, *kept = (_forward_4bit if ctx.packed else _forward)(*arguments)
        tensors = _TENSORS + 2 * _SCALES * ctx.packed
        ctx.save_for_backward(*kept, *arguments[:tensors])
        ctx.mark_non_differentiable(*kept)
        ctx.constants = arguments[tensors:]
        return out, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_of_kept: Tensor | None) -> tuple[Any, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        kept, tensors = saved[:3], saved[3:]
        needed = [*wanted[:_INPUTS], *wanted[_INPUTS + _PLAN : _TENSORS]]
        run = _backward_4bit if ctx.packed else _backward
        found = iter(run(grad.contiguous(), *kept, needed, *tensors, *ctx.constants))
        hidden, weights, *block = [next(found) if need else None for need in needed]
        rest = len(wanted) - _TENSORS
        return hidden, weights, *[None] * _PLAN, *block, *[None] * rest


_experts = differentiable("experts_with_gradient", f"({_DENSE}) -> {_RESULTS}", _ExpertsInGraph)
_experts_4bit = differentiable("experts_4bit_with_gradient", f"({_PACKED}) -> {_RESULTS}", _ExpertsInGraph)
