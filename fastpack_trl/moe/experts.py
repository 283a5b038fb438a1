"""One experts block as one autograd function: gather, grouped GEMM, gate, grouped GEMM, combine.

Saved for backward: the layer's input, the pre-activation and the plan; with LoRA, its two activations of rank r.
Backward only gathers, skips the weight gradient of frozen experts and takes the gradient of the routing weights from
the activation, so that there is no second down product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.combine import bias_weight_grad, combine
from fastpack_trl.kernels.gate import gate_backward, gate_forward
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.grouped import Offsets, grouped_mm, grouped_outer, grouped_sum, offsets_for
from fastpack_trl.moe.quantised import Packed
from fastpack_trl.moe.routing import RoutingPlan


class ExpertWeights(NamedTuple):
    """The tensors of an experts block, in the model's own layout; F = 2I."""

    gate_up: Tensor
    """(E, F, H), or (E, H, F) where `BlockForm.transposed`."""
    gate_up_bias: Tensor | None
    """(E, F)."""
    down: Tensor
    """(E, H, I), or (E, I, H) where transposed."""
    down_bias: Tensor | None
    """(E, H)."""
    gate_up_a: Tensor | None = None
    """(E, r, H), first factor of a low-rank addition."""
    gate_up_b: Tensor | None = None
    """(E, r, F), second factor."""
    down_a: Tensor | None = None
    """(E, r, I)."""
    down_b: Tensor | None = None
    """(E, r, H)."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Non-tensor settings of an experts block.

    Attributes:
        gate: the activation between the projections.
        transposed: weights are stored as (E, in, out).
        gate_up_scale, down_scale: factors of the low-rank additions.
        gate_up_packed, down_packed: how a stack that is stored in four bits is made dense; made again for each use.
    """

    gate: Gate
    transposed: bool
    gate_up_scale: float = 1.0
    down_scale: float = 1.0
    gate_up_packed: Packed | None = None
    down_packed: Packed | None = None


class Kept(NamedTuple):
    """Tensors that backward needs beside the inputs."""

    h: Tensor
    """(S, F), pre-activation without bias, in the dtype of the experts."""
    low_up: Tensor | None
    """(S, r), low-rank activation of the first projection, or None."""
    low_down: Tensor | None
    """(S, r), that of the second, or None."""


class _Projection(NamedTuple):
    """One of the two projections of a block: a stack of matrices, and a low-rank addition to it.

    Sizes: S routed rows, K in, N out, r the rank.
    """

    stored: Tensor
    packed: Packed | None
    a: Tensor | None
    b: Tensor | None
    scale: float
    transposed: bool
    offsets: Offsets

    def weight(self) -> Tensor:
        """Return the stack as (E, K, N)."""
        weight = self.stored if self.packed is None else self.packed.dense(self.stored)
        return weight if self.transposed else weight.transpose(1, 2)

    def product(self, x_sk: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output (S, N), without a dense delta of the weights, and ``x a^T`` (S, r)."""
        out_sn = grouped_mm(x_sk, self.weight(), self.offsets)
        if self.a is None or self.b is None:
            return out_sn, None
        low_sr = grouped_mm(x_sk, self.a.transpose(1, 2), self.offsets)
        out_sn.add_(grouped_mm(low_sr, self.b, self.offsets), alpha=self.scale)
        return out_sn, low_sr

    def low_grad(self, grad_sn: Tensor) -> Tensor | None:
        """Return the gradient (S, r) of the low-rank activation."""
        return None if self.b is None else grouped_mm(grad_sn, self.b.transpose(1, 2), self.offsets).mul_(self.scale)

    def input_grad(self, grad_sn: Tensor, low_grad_sr: Tensor | None) -> Tensor:
        """Return the gradient (S, K) of the input."""
        grad_sk = grouped_mm(grad_sn, self.weight().transpose(1, 2), self.offsets)
        if low_grad_sr is not None and self.a is not None:
            grad_sk.add_(grouped_mm(low_grad_sr, self.a, self.offsets))
        return grad_sk

    def own_grads(
        self, x_sk: Tensor, grad_sn: Tensor, low_grad_sr: Tensor | None, low_sr: Tensor | None, need: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the stack and of its two low-rank factors, each only where needed."""
        weight = a = b = None
        if need[0]:
            pair = (x_sk, grad_sn) if self.transposed else (grad_sn, x_sk)
            weight = grouped_outer(*pair, self.offsets)
        if need[1] and low_grad_sr is not None:
            a = grouped_outer(low_grad_sr, x_sk, self.offsets)
        if need[2] and low_sr is not None:
            b = grouped_outer(low_sr * self.scale, grad_sn, self.offsets)
        return weight, a, b


def _projections(plan: RoutingPlan, block: ExpertWeights, form: BlockForm) -> tuple[_Projection, _Projection]:
    """Return the projections to gate and up, and down."""
    offsets = offsets_for(plan.offsets, _dtype(block, form))
    up = (block.gate_up, form.gate_up_packed, block.gate_up_a, block.gate_up_b, form.gate_up_scale)
    down = (block.down, form.down_packed, block.down_a, block.down_b, form.down_scale)
    return _Projection(*up, form.transposed, offsets), _Projection(*down, form.transposed, offsets)


def experts_forward(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm
) -> tuple[Tensor, Kept]:
    """Return the output (T, H) in the dtype of `hidden_th`, and what backward needs."""
    gate_up, down = _projections(plan, block, form)
    h_sf, low_up = gate_up.product(hidden_th.to(_dtype(block, form)).index_select(0, plan.token))
    y_sh, low_down = down.product(gate_forward(h_sf, block.gate_up_bias, plan.expert, form.gate))
    ids_tk = None if block.down_bias is None else _ids(plan)
    out = combine(y_sh, plan.inverse, weights_tk, bias_eh=block.down_bias, ids_tk=ids_tk, dtype=hidden_th.dtype)
    return out, Kept(h_sf, low_up, low_down)


def experts_backward(
    grad_th: Tensor,
    hidden_th: Tensor,
    weights_tk: Tensor,
    kept: Kept,
    plan: RoutingPlan,
    block: ExpertWeights,
    form: BlockForm,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input, the routing weights and each tensor of `block`; None where not `needed`.

    Args:
        grad_th: (T, H), gradient of the output.
        kept: from `experts_forward`.
        needed: one entry per result: hidden, weights, then the fields of `ExpertWeights` in order.
    """
    need_hidden, need_weights, need_up, need_up_bias, need_down, need_down_bias, *need_factors = needed
    need_up_stack, need_down_stack = (need_up, *need_factors[:2]), (need_down, *need_factors[2:])
    dtype = _dtype(block, form)
    to_gate_up, to_down = _projections(plan, block, form)

    # Down: the product comes before the routing weight, which `gate_backward` applies.
    grad_cast_th = grad_th.to(dtype)
    g_sh = grad_cast_th.index_select(0, plan.token)
    low_grad = to_down.low_grad(g_sh)
    weight_s = plan.sorted_weights(weights_tk)
    grad_h_sf, weighted_a_si, grad_weight_s = gate_backward(
        kept.h, block.gate_up_bias, plan.expert, form.gate, to_down.input_grad(g_sh, low_grad), weight_s
    )
    weighted_low = None if kept.low_down is None else (kept.low_down * weight_s.unsqueeze(1)).to(dtype)
    down, down_a, down_b = to_down.own_grads(weighted_a_si, g_sh, low_grad, weighted_low, need_down_stack)
    down_bias = grouped_sum(g_sh, to_down.offsets, weight_s) if need_down_bias else None
    del g_sh, weighted_a_si
    grad_weights = None
    if need_weights:
        grad_weights = grad_weight_s.index_select(0, plan.inverse.reshape(-1)).view(weights_tk.shape)
        if block.down_bias is not None:
            grad_weights = grad_weights + bias_weight_grad(grad_cast_th, block.down_bias, _ids(plan))
        grad_weights = grad_weights.to(weights_tk.dtype)

    # Gate and up.
    low_grad = to_gate_up.low_grad(grad_h_sf)
    grad_hidden = None
    if need_hidden:
        grad_hidden = combine(to_gate_up.input_grad(grad_h_sf, low_grad), plan.inverse, dtype=hidden_th.dtype)
    gate_up_bias = grouped_sum(grad_h_sf, to_gate_up.offsets) if need_up_bias else None
    gate_up = gate_up_a = gate_up_b = None
    if any(need_up_stack):
        x_sh = hidden_th.to(dtype).index_select(0, plan.token)
        gate_up, gate_up_a, gate_up_b = to_gate_up.own_grads(x_sh, grad_h_sf, low_grad, kept.low_up, need_up_stack)
    return (
        grad_hidden, grad_weights, gate_up, gate_up_bias, down, down_bias, gate_up_a, gate_up_b, down_a, down_b
    )  # fmt: skip


class ExpertsFunction(torch.autograd.Function):
    """`experts_forward` with `experts_backward` as its derivative. Call `experts` instead."""

    @staticmethod
    def forward(
        ctx: Any, plan: RoutingPlan, form: BlockForm, hidden_th: Tensor, weights_tk: Tensor, *block: Tensor | None
    ) -> Tensor:
        weights = ExpertWeights(*block)
        out, kept = experts_forward(hidden_th, weights_tk, plan, weights, form)
        # The plan is saved as tensors too: under checkpointing it must be that of the recomputed activations.
        ctx.save_for_backward(hidden_th, weights_tk, *kept, *plan.tensors(), *block)
        ctx.form = form
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_th: Tensor) -> tuple[Any, ...]:
        hidden_th, weights_tk, *rest = ctx.saved_tensors
        kept, plan, block = Kept(*rest[:3]), RoutingPlan(*rest[3:7]), ExpertWeights(*rest[7:])
        grads = experts_backward(grad_th, hidden_th, weights_tk, kept, plan, block, ctx.form, ctx.needs_input_grad[2:])
        return None, None, *grads


def experts(hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm) -> Tensor:
    """Return the output (T, H) of an experts block, differentiable in input, routing weights and tensors of `block`.

    Args:
        hidden_th: (T, H); cast to the dtype of the experts, as transformers does.
        weights_tk: (T, k) routing weights, any float dtype.
        plan: of the (T, k) expert ids.
        block, form: the experts.
    """
    out: Tensor = ExpertsFunction.apply(plan, form, hidden_th, weights_tk, *block)
    return out


def _dtype(block: ExpertWeights, form: BlockForm) -> torch.dtype:
    return block.gate_up.dtype if form.gate_up_packed is None else form.gate_up_packed.dtype


def _ids(plan: RoutingPlan) -> Tensor:
    """Return the (T, k) expert ids."""
    return plan.expert.index_select(0, plan.inverse.reshape(-1)).view(plan.inverse.shape)
