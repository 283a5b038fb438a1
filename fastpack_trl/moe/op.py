"""The experts block as operators, for compiled graphs: `torch.compile` neither looks inside nor breaks there.

Eager code takes `ExpertsFunction`, which has less overhead. A gate of the model's own cannot be part of an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.moe.experts import BlockForm, ExpertWeights, Kept, experts_backward, experts_forward
from fastpack_trl.moe.routing import RoutingPlan

_INPUTS, _PLAN, _BLOCK = 2, 4, len(ExpertWeights._fields)
_TENSORS = _INPUTS + _PLAN + _BLOCK


class _Form(NamedTuple):
    """The fields of a `BlockForm` without packed stacks, as constants of an operator."""

    kind: str
    interleaved: bool
    alpha: float
    limit: float
    transposed: bool
    gate_up_scale: float
    down_scale: float

    def block_form(self) -> BlockForm:
        gate = Gate(cast("Any", self.kind), self.interleaved, self.alpha, self.limit)
        return BlockForm(gate, self.transposed, self.gate_up_scale, self.down_scale)


class _Call(NamedTuple):
    """One call of the block."""

    hidden: Tensor
    """(T, H)."""
    weights: Tensor
    """(T, k) routing weights."""
    plan: RoutingPlan
    block: ExpertWeights
    form: _Form

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> _Call:
        """Read the arguments of an operator: the input, the weights, the plan, the block and the form, flat."""
        hidden, weights, *rest = arguments
        plan, block, form = rest[:_PLAN], rest[_PLAN : _PLAN + _BLOCK], rest[_PLAN + _BLOCK :]
        return cls(hidden, weights, RoutingPlan(*plan), ExpertWeights(*block), _Form(*form))

    def product_flops(self, stack: Tensor | None) -> int:
        """Return the operations of every routed row times its matrix of a stack; 0 without one."""
        return 0 if stack is None else 2 * self.plan.perm.shape[0] * stack.shape[1] * stack.shape[2]


def experts_in_graph(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm
) -> Tensor:
    """Run `fastpack_trl.moe.experts.experts` as one node of a graph, with one node for its backward."""
    gate = form.gate
    out: Tensor = _experts(
        hidden_th, weights_tk, *plan.tensors(), *block,
        gate.kind, gate.interleaved, gate.alpha, gate.limit, form.transposed, form.gate_up_scale, form.down_scale,
    )[0]  # fmt: skip
    return out


def experts(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output (T, H), then the fields of `Kept`; an empty tensor for one that is None."""
    call = _Call.of(arguments)
    out, kept = experts_forward(call.hidden, call.weights, call.plan, call.block, call.form.block_form())
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
    grads = experts_backward(
        grad, call.hidden, call.weights, kept, call.plan, call.block, call.form.block_form(), tuple(needed)
    )
    return [value.contiguous() for value, need in zip(grads, needed, strict=True) if need and value is not None]


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call.of(arguments)
    gate_up, slots = call.block.gate_up, call.plan.perm.shape[0]
    width = gate_up.shape[2] if call.form.transposed else gate_up.shape[1]
    up, low = (
        gate_up.new_empty(0) if a is None else gate_up.new_empty(slots, a.shape[1])
        for a in (call.block.gate_up_a, call.block.down_a)
    )
    return torch.empty_like(call.hidden), gate_up.new_empty(slots, width), up, low


def _fake_gradients(
    _grad: Tensor, _pre_activation: Tensor, _up: Tensor, _down: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    call = _Call.of(arguments)
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        for value, need in zip((call.hidden, call.weights, *call.block), needed, strict=True)
        if need and value is not None
    ]


def _stacks(block: ExpertWeights) -> tuple[Tensor | None, ...]:
    return block.gate_up, block.down, block.gate_up_a, block.gate_up_b, block.down_a, block.down_b


def _flops(*arguments: Any, **_keywords: Any) -> int:
    call = _Call.of(arguments)
    return sum(map(call.product_flops, _stacks(call.block)))


def _flops_gradients(
    _grad: Tensor, _pre_activation: Tensor, _up: Tensor, _down: Tensor, needed: Sequence[bool], *arguments: Any,
    **_keywords: Any,
) -> int:  # fmt: skip
    """Count the products of the input's gradient, and of the weight gradients that are needed."""
    call = _Call.of(arguments)
    need_hidden, _, *need_block = needed
    total = sum(map(call.product_flops, _stacks(call.block)))
    if not need_hidden:
        total -= call.product_flops(call.block.gate_up)
    trained = zip(call.block, need_block, strict=True)
    return total + sum(
        call.product_flops(value) for value, need in trained if need and value is not None and value.ndim == 3
    )


_ARGUMENTS = ", ".join(("Tensor hidden, Tensor weights", *map(arguments_of, (RoutingPlan, ExpertWeights, _Form))))
_FORWARD = f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
_forward = operator(experts, fake=_fake, flops=_flops, signature=_FORWARD)
_backward = operator(
    experts_gradients, fake=_fake_gradients, flops=_flops_gradients,
    signature="(Tensor grad, Tensor pre_activation, Tensor low_up, Tensor low_down, bool[] needed, "
    f"{_ARGUMENTS}) -> Tensor[]",
)  # fmt: skip


class _ExpertsInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        out, *kept = _forward(*arguments)
        ctx.save_for_backward(*kept, *arguments[:_TENSORS])
        ctx.mark_non_differentiable(*kept)
        ctx.constants = arguments[_TENSORS:]
        return out, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_of_kept: Tensor | None) -> tuple[Any, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        kept, tensors = saved[:3], saved[3:]
        needed = [*wanted[:_INPUTS], *wanted[_INPUTS + _PLAN : _TENSORS]]
        found = iter(_backward(grad.contiguous(), *kept, needed, *tensors, *ctx.constants))
        hidden, weights, *block = [next(found) if need else None for need in needed]
        return hidden, weights, *[None] * _PLAN, *block, *[None] * len(ctx.constants)


_experts = differentiable("experts_with_gradient", _FORWARD, _ExpertsInGraph)
