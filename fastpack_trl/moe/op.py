"""The experts block as two operators, for compiled graphs: `torch.compile` neither looks inside nor breaks there.

Eager code takes `ExpertsFunction`, which has less overhead. A gate of the model's own cannot be part of an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastpack_trl.kernels.gate import Gate
from fastpack_trl.moe.experts import BlockForm, ExpertWeights, Kept, experts_backward, experts_forward
from fastpack_trl.moe.routing import RoutingPlan

_OPTIONAL = len(ExpertWeights._fields)


def experts_in_graph(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm
) -> Tensor:
    """`fastpack_trl.moe.experts.experts` as one node of a graph, with one node for its backward."""
    gate = form.gate
    out: Tensor = _experts(
        hidden_th, weights_tk, *plan.tensors(), *block,
        gate.kind, gate.interleaved, gate.alpha, gate.limit, form.transposed, form.gate_up_scale, form.down_scale,
    )[0]  # fmt: skip
    return out


def _form(
    kind: str, interleaved: bool, alpha: float, limit: float, transposed: bool, gate_up_scale: float, down_scale: float
) -> BlockForm:
    gate = Gate(cast("Any", kind), interleaved=interleaved, alpha=alpha, limit=limit)
    return BlockForm(gate, transposed, gate_up_scale, down_scale)


@torch.library.custom_op("fastpack::experts", mutates_args=())
def _experts(
    hidden: Tensor, weights: Tensor, perm: Tensor, inverse: Tensor, expert: Tensor, offsets: Tensor,
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    gate_up_a: Tensor | None, gate_up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    kind: str, interleaved: bool, alpha: float, limit: float, transposed: bool, gate_up_scale: float, down_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (T, H), then the fields of `Kept`; empty where there is none."""
    block = ExpertWeights(gate_up, gate_up_bias, down, down_bias, gate_up_a, gate_up_b, down_a, down_b)
    form = _form(kind, interleaved, alpha, limit, transposed, gate_up_scale, down_scale)
    out, kept = experts_forward(hidden, weights, RoutingPlan(perm, inverse, expert, offsets), block, form)
    up, low = (kept.h.new_empty(0) if value is None else value for value in kept[1:])
    return out, kept.h, up, low


@_experts.register_fake
def _(hidden: Tensor, weights: Tensor, perm: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, gate_up_a, down_a, transposed = rest[3], rest[7], rest[9], rest[-3]
    width = gate_up.shape[2] if transposed else gate_up.shape[1]
    low = (
        gate_up.new_empty(0) if a is None else gate_up.new_empty(perm.shape[0], a.shape[1]) for a in (gate_up_a, down_a)
    )
    return torch.empty_like(hidden), gate_up.new_empty(perm.shape[0], width), *low


@torch.library.custom_op("fastpack::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor, pre_activation: Tensor, low_up: Tensor, low_down: Tensor, needed: Sequence[bool],
    hidden: Tensor, weights: Tensor, perm: Tensor, inverse: Tensor, expert: Tensor, offsets: Tensor,
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    gate_up_a: Tensor | None, gate_up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    kind: str, interleaved: bool, alpha: float, limit: float, transposed: bool, gate_up_scale: float, down_scale: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients that are needed, in order: hidden, weights, then the tensors of the block."""
    block = ExpertWeights(gate_up, gate_up_bias, down, down_bias, gate_up_a, gate_up_b, down_a, down_b)
    form = _form(kind, interleaved, alpha, limit, transposed, gate_up_scale, down_scale)
    plan = RoutingPlan(perm, inverse, expert, offsets)
    kept = Kept(pre_activation, None if gate_up_a is None else low_up, None if down_a is None else low_down)
    grads = experts_backward(grad, hidden, weights, kept, plan, block, form, tuple(needed))
    return [value.contiguous() for value, need in zip(grads, needed, strict=True) if need and value is not None]


@_experts_backward.register_fake
def _(
    grad: Tensor, pre_activation: Tensor, low_up: Tensor, low_down: Tensor, needed: Sequence[bool], *rest: Any
) -> list[Tensor]:
    hidden, weights, block = rest[0], rest[1], rest[6 : 6 + _OPTIONAL]
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        for value, need in zip((hidden, weights, *block), needed, strict=True)
        if need
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = inputs[: 6 + _OPTIONAL]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.numbers = inputs[6 + _OPTIONAL :]


def _backward(ctx: Any, grad: Tensor, *_of_kept: Tensor | None) -> tuple[Any, ...]:
    kept, tensors = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    wanted = ctx.needs_input_grad
    needed = [*wanted[:2], *wanted[6 : 6 + _OPTIONAL]]
    found = iter(_experts_backward(grad.contiguous(), *kept, needed, *tensors, *ctx.numbers))
    hidden, weights, *block = [next(found) if need else None for need in needed]
    return hidden, weights, None, None, None, None, *block, *(None for _ in ctx.numbers)


_experts.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.fastpack.experts)
def experts_flops(
    hidden: Any, weights: Any, perm: Any, inverse: Any, expert: Any, offsets: Any,
    gate_up: Any, gate_up_bias: Any, down: Any, down_bias: Any, gate_up_a: Any, gate_up_b: Any, down_a: Any,
    down_b: Any, *_numbers: Any, **_kwargs: Any,
) -> int:  # fmt: skip
    """Two per multiplication of the grouped products; arguments are shapes."""
    stacks = [shape for shape in (gate_up, down, gate_up_a, gate_up_b, down_a, down_b) if shape is not None]
    return sum(2 * int(perm[0]) * int(shape[1]) * int(shape[2]) for shape in stacks)


@register_flop_formula(torch.ops.fastpack.experts_backward)
def experts_backward_flops(
    grad: Any, pre_activation: Any, low_up: Any, low_down: Any, needed: Sequence[bool], hidden: Any, weights: Any,
    perm: Any, *rest: Any, **_kwargs: Any,
) -> int:  # fmt: skip
    """The input gradients and the weight gradients that are needed."""
    gate_up, _gate_up_bias, down, _down_bias, *factors = rest[3 : 3 + _OPTIONAL]

    def product(shape: Any) -> int:
        return 2 * int(perm[0]) * int(shape[1]) * int(shape[2])

    total = product(gate_up) * int(needed[0]) + product(down)
    total += sum(product(shape) for shape in factors if shape is not None)
    for need, shape in zip(needed[2:], rest[3 : 3 + _OPTIONAL], strict=True):
        if need and shape is not None and len(shape) == 3:
            total += product(shape)
    return total
