"""One experts block as one autograd function: gather, grouped GEMM, gate, grouped GEMM, combine.

Saved for backward: the layer's input, the pre-activation and the plan; with LoRA, its two activations of rank r.
Backward only gathers, skips the weight gradient of frozen experts, and computes the gradient of the routing weights
from the activation, without a second down projection.

In a compiled graph forward and backward are one operator each: `torch.compile` neither traces it nor breaks there, and
4-bit stacks are dequantized inside, where the graph cannot save them for backward. The model's own gate cannot be part
of an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.combine import bias_weight_grad, combine
from fastpack_trl.kernels.dequantize import Scales, dequantize_4bit
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.grouped import Offsets, grouped_mm, grouped_outer, grouped_sum, offsets_for
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.moe.routing import RoutingPlan


class Stack(NamedTuple):
    """The tensors of one of the two stacks of a block, in the model's own layout. Sizes: K in, N out, r the rank."""

    weight: Tensor
    """(E, N, K), or (E, K, N) if `Form.transposed`; or bitsandbytes' packed storage of either."""
    bias: Tensor | None = None
    """(E, N)."""
    a: Tensor | None = None
    """(E, r, K), first factor of a low-rank addition ``x -> scale * (x a^T) b``."""
    b: Tensor | None = None
    """(E, r, N), second factor."""
    absmax: Tensor | None = None
    """This and the next three are the scales of a packed stack: the fields of `Scales`."""
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None


class StackForm(NamedTuple):
    """The constants of a stack: the factor of its low-rank addition, and how to dequantize a packed one."""

    scale: float = 1.0
    quant_type: str = ""
    blocksize: int = 0
    nested_blocksize: int = 0
    experts: int = 0
    rows: int = 0
    columns: int = 0
    dtype: torch.dtype = torch.float32


class Form(NamedTuple):
    """The constants of a block."""

    gate: Gate
    transposed: bool
    """Stacks are stored as (E, in, out)."""
    gate_up: StackForm = StackForm()
    down: StackForm = StackForm()

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments of an operator."""
        gate = (self.gate.kind, self.gate.interleaved, self.gate.alpha, self.gate.limit)
        return *gate, self.transposed, *self.gate_up, *self.down

    @classmethod
    def of(cls, kind: str, interleaved: bool, alpha: float, limit: float, transposed: bool, *stacks: Any) -> Form:
        """Build a form from the tuple that `flat` returns."""
        middle = len(StackForm._fields)
        gate = Gate(cast("Any", kind), interleaved, alpha, limit)
        return cls(gate, transposed, StackForm(*stacks[:middle]), StackForm(*stacks[middle:]))


@dataclass(slots=True)
class _Projection:
    """One of the two projections of a block over S routed rows, sorted by expert."""

    stack: Stack
    form: StackForm
    transposed: bool
    offsets: Offsets = ()

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype."""
        return self.form.dtype if self.form.quant_type else self.stack.weight.dtype

    @property
    def shape(self) -> Sequence[int]:
        """Return the shape of the dense stack, as it is stored."""
        form = self.form
        return (form.experts, form.rows, form.columns) if form.quant_type else self.stack.weight.shape

    def weight(self) -> Tensor:
        """Return the stack as (E, K, N); a packed one is dequantized for each use."""
        weight, form = self.stack.weight, self.form
        if form.quant_type:
            assert self.stack.absmax is not None
            state = Scales(self.stack.absmax, *self.stack[-3:]).state(
                quant_type=form.quant_type, blocksize=form.blocksize, nested_blocksize=form.nested_blocksize,
                shape=tuple(self.shape), dtype=form.dtype,
            )  # fmt: skip
            weight = dequantize_4bit(weight, state)
        return weight if self.transposed else weight.transpose(1, 2)

    def product(self, x_sk: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output (S, N); what LoRA adds, without a dense delta; ``scale * x a^T`` (S, r), maybe empty.

        The addend stays apart, as that of `input_grad` does: the kernel that reads both adds them.
        """
        out_sn = grouped_mm(x_sk, self.weight(), self.offsets)
        if self.stack.a is None or self.stack.b is None:
            return out_sn, None, out_sn.new_empty(0)
        low_sr = grouped_mm(x_sk, self.stack.a.transpose(1, 2), self.offsets).mul_(self.form.scale)
        return out_sn, grouped_mm(low_sr, self.stack.b, self.offsets), low_sr

    def low_grad(self, grad_sn: Tensor) -> Tensor | None:
        """Return the gradient (S, r) of the low-rank activation."""
        if self.stack.b is None:
            return None
        return grouped_mm(grad_sn, self.stack.b.transpose(1, 2), self.offsets).mul_(self.form.scale)

    def input_grad(self, grad_sn: Tensor, low_grad_sr: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradient (S, K) of the input, and what LoRA adds to it."""
        grad_sk = grouped_mm(grad_sn, self.weight().transpose(1, 2), self.offsets)
        if low_grad_sr is None or self.stack.a is None:
            return grad_sk, None
        return grad_sk, grouped_mm(low_grad_sr, self.stack.a, self.offsets)

    def own_grads(
        self, x_sk: Tensor, grad_sn: Tensor, low_grad_sr: Tensor | None, low_sr: Tensor, need: Stack, *of_bias: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients of weight, bias, a and b, each only if needed; `of_bias`: weights of its rows."""
        pair = (x_sk, grad_sn) if self.transposed else (grad_sn, x_sk)
        return [
            grouped_outer(*pair, self.offsets) if need.weight else None,
            grouped_sum(grad_sn, self.offsets, *of_bias) if need.bias else None,
            grouped_outer(low_grad_sr, x_sk, self.offsets) if need.a and low_grad_sr is not None else None,
            grouped_outer(low_sr, grad_sn, self.offsets) if need.b else None,
        ]


_STACK = len(Stack._fields)
_TENSORS = 2 + len(RoutingPlan._fields) + 2 * _STACK
"""Number of tensors at the beginning of an operator's arguments: input, routing weights, plan, stacks."""


class _Call(NamedTuple):
    """One call of the block: its arguments, read from those of an operator."""

    hidden: Tensor
    """(T, H)."""
    weights: Tensor
    """(T, k) routing weights."""
    plan: RoutingPlan
    gate_up: _Projection
    down: _Projection
    gate: Gate

    @classmethod
    def of(cls, arguments: Sequence[Any], *, with_offsets: bool = False) -> _Call:
        """Read tensors and constants, and the offsets if matmuls follow, because some devices read them on the host."""
        tensors, constants = arguments[:_TENSORS], arguments[_TENSORS:]
        form = constants[0] if len(constants) == 1 else Form.of(*constants)
        plan = RoutingPlan(*tensors[2 : -2 * _STACK])
        up = _Projection(Stack(*tensors[-2 * _STACK : -_STACK]), form.gate_up, form.transposed)
        down = _Projection(Stack(*tensors[-_STACK:]), form.down, form.transposed)
        if with_offsets:
            up.offsets = down.offsets = offsets_for(plan.offsets, up.dtype)
        return cls(tensors[0], tensors[1], plan, up, down, form.gate)

    def product_flops(self, *shapes: Sequence[int]) -> int:
        """Return the operations of all routed rows times their matrices, per stack."""
        return sum(2 * self.plan.perm.shape[0] * shape[1] * shape[2] for shape in shapes)

    def flops(self) -> int:
        """Return the operations of all routed rows times their matrices."""
        factors = (*self.gate_up.stack[2:4], *self.down.stack[2:4])
        shapes = [factor.shape for factor in factors if factor is not None]
        return self.product_flops(self.gate_up.shape, self.down.shape, *shapes)


def experts_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output (T, H) in the dtype of the input, and what backward needs in addition to the inputs.

    These are the pre-activation (S, 2I) without bias, and the low-rank activations (S, r) of both projections, empty
    without LoRA.
    """
    hidden, weights, plan, gate_up, down, gate = _Call.of(arguments, with_offsets=True)
    h_sf, more, low_up = gate_up.product(hidden.to(gate_up.dtype).index_select(0, plan.token))
    if more is not None:
        h_sf.add_(more)
    y_sh, more, low_down = down.product(gate_forward(h_sf, gate_up.stack.bias, plan.expert, gate))
    ids_tk = None if down.stack.bias is None else plan.ids
    out = combine(y_sh, plan.inverse, weights, more_sh=more, bias_eh=down.stack.bias, ids_tk=ids_tk, dtype=hidden.dtype)
    return out, h_sf, low_up, low_down


def experts_backward(
    grad: Tensor, h: Tensor, low_up: Tensor, low_down: Tensor, needed: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """Return the gradients of the tensors of `arguments` that are `needed`, in order.

    `grad` is that of the output, (T, H); `h`, `low_up` and `low_down` come from `experts_forward`.
    """
    hidden, weights, plan, gate_up, down, gate = _Call.of(arguments, with_offsets=True)
    need_up, need_down = Stack(*needed[-2 * _STACK : -_STACK]), Stack(*needed[-_STACK:])
    dtype = gate_up.dtype

    # Down: the matmul comes before the routing weight, which `gate_backward` applies.
    grad_cast_th = grad.to(dtype)
    g_sh = grad_cast_th.index_select(0, plan.token)
    low_grad = down.low_grad(g_sh)
    weight_s = weights.reshape(-1).index_select(0, plan.perm)
    grad_a_si, more = down.input_grad(g_sh, low_grad)
    grad_h_sf, weighted_a_si, grad_weight_s = gate_backward(
        h, gate_up.stack.bias, plan.expert, gate, grad_a_si, weight_s, more
    )
    weighted_low = (low_down * weight_s.unsqueeze(1)).to(dtype) if low_down.numel() else low_down
    of_down = down.own_grads(weighted_a_si, g_sh, low_grad, weighted_low, need_down, weight_s)
    del g_sh, weighted_a_si
    grad_weights = None
    if needed[1]:
        grad_weights = grad_weight_s.index_select(0, plan.inverse.reshape(-1)).view(weights.shape)
        if down.stack.bias is not None:
            grad_weights = grad_weights + bias_weight_grad(grad_cast_th, down.stack.bias, plan.ids)
        grad_weights = grad_weights.to(weights.dtype)

    # Gate and up.
    low_grad = gate_up.low_grad(grad_h_sf)
    grad_hidden = None
    if needed[0]:
        grad_x_sh, more = gate_up.input_grad(grad_h_sf, low_grad)
        grad_hidden = combine(grad_x_sh, plan.inverse, more_sh=more, dtype=hidden.dtype)
    x_sh = grad_h_sf  # not read unless a gradient of the stack is needed
    if need_up.weight or need_up.a or need_up.b:
        x_sh = hidden.to(dtype).index_select(0, plan.token)
    of_up = gate_up.own_grads(x_sh, grad_h_sf, low_grad, low_up, need_up)
    grads = (grad_hidden, grad_weights, *of_up, *of_down)
    return [grad.contiguous() for grad in grads if grad is not None]


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call.of(arguments)
    stored, dtype, slots = call.gate_up.stack.weight, call.gate_up.dtype, call.plan.perm.shape[0]
    width = call.gate_up.shape[2 if call.gate_up.transposed else 1]
    up, low = (
        stored.new_empty(0, dtype=dtype) if a is None else stored.new_empty(slots, a.shape[1], dtype=dtype)
        for a in (call.gate_up.stack.a, call.down.stack.a)
    )
    return torch.empty_like(call.hidden), stored.new_empty(slots, width, dtype=dtype), up, low


def _fake_backward(_grad: Any, _h: Any, _up: Any, _down: Any, needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    wanted = [value for value, need in zip(arguments, needed, strict=False) if need]
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in wanted]


def _flops_backward(
    _grad: Any, _h: Any, _up: Any, _down: Any, needed: Sequence[bool], *arguments: Any, **_keywords: Any
) -> int:
    """Count the matmuls of the input's gradient and of the needed weight gradients."""
    call = _Call.of(arguments)
    trained = [value.shape for value, need in zip(arguments, needed, strict=False) if need and value.ndim == 3]
    through_gate_up = 0 if needed[0] else call.product_flops(call.gate_up.shape)
    return call.flops() - through_gate_up + call.product_flops(*trained)


_ARGUMENTS = (
    f"Tensor hidden, Tensor weights, {arguments_of(RoutingPlan)}, {arguments_of(Stack, 'up_')}, "
    f"{arguments_of(Stack, 'down_')}, str kind, bool interleaved, float alpha, float limit, bool transposed, "
    f"{arguments_of(StackForm, 'up_')}, {arguments_of(StackForm, 'down_')}"
)
_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
_GRADIENT = "Tensor grad, Tensor pre_activation, Tensor low_up, Tensor low_down, bool[] needed"
_forward = operator(
    experts_forward, fake=_fake_forward, flops=lambda *arguments, **_: _Call.of(arguments).flops(),
    signature=f"({_ARGUMENTS}) -> {_RESULTS}",
)  # fmt: skip
_backward = operator(
    experts_backward, fake=_fake_backward, flops=_flops_backward, signature=f"({_GRADIENT}, {_ARGUMENTS}) -> Tensor[]"
)


class _Experts(torch.autograd.Function):
    """Run an experts block under autograd.

    Arguments: the tensors, then a `Form` (in a compiled graph: the values of `Form.flat`).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.constants = arguments[_TENSORS:]
        out, *kept = (_forward if len(ctx.constants) > 1 else experts_forward)(*arguments)
        # Save the plan's tensors too: under checkpointing it must match the recomputed activations.
        ctx.save_for_backward(*kept, *arguments[:_TENSORS])
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # otherwise autograd passes zeros of full size to backward
        return out, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_of_kept: Tensor | None) -> tuple[Tensor | None, ...]:
        h, low_up, low_down, *tensors = ctx.saved_tensors
        run, needed = _backward if len(ctx.constants) > 1 else experts_backward, ctx.needs_input_grad
        grads = iter(run(grad.contiguous(), h, low_up, low_down, needed[:_TENSORS], *tensors, *ctx.constants))
        return tuple(next(grads) if need else None for need in needed)


_experts = differentiable("experts", f"({_ARGUMENTS}) -> {_RESULTS}", _Experts)


def experts(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, gate_up: Stack, down: Stack, form: Form
) -> Tensor:
    """Return the output (T, H) of an experts block, differentiable in input, routing weights, stacks and factors.

    The input is cast to the dtype of the experts, as transformers does; routing weights may have any float dtype.
    """
    tensors = (hidden_th, weights_tk, *plan, *gate_up, *down)
    out: Tensor
    if torch.compiler.is_compiling():
        out, *_ = _experts(*tensors, *form.flat())
    else:
        out, *_ = _Experts.apply(*tensors, form)
    return out
