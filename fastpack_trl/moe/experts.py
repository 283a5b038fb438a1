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
    """The tensors of an experts block, in the model's own layout; F = 2I.

    Attributes:
        gate_up: (E, F, H), or (E, H, F) where `BlockForm.transposed`.
        gate_up_bias: (E, F) or None.
        down: (E, H, I), or (E, I, H) where transposed.
        down_bias: (E, H) or None.
        gate_up_a: (E, r, H), first factor of a low-rank addition, or None.
        gate_up_b: (E, r, F), second factor, or None.
        down_a: (E, r, I) or None.
        down_b: (E, r, H) or None.
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    gate_up_a: Tensor | None = None
    gate_up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


class ExpertNeeds(NamedTuple):
    """Need of a gradient, for each tensor of `ExpertWeights`."""

    gate_up: bool
    gate_up_bias: bool
    down: bool
    down_bias: bool
    gate_up_a: bool
    gate_up_b: bool
    down_a: bool
    down_b: bool

    @property
    def gate_up_stack(self) -> tuple[bool, bool, bool]:
        """Return the needs of the stack and of its two factors."""
        return self.gate_up, self.gate_up_a, self.gate_up_b

    @property
    def down_stack(self) -> tuple[bool, bool, bool]:
        """Return the needs of the stack and of its two factors."""
        return self.down, self.down_a, self.down_b


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
    """Tensors that backward needs beside the inputs.

    Attributes:
        h: (S, F), pre-activation without bias, in the dtype of the experts.
        low_up: (S, r), low-rank activation of the first projection, or None.
        low_down: (S, r), that of the second, or None.
    """

    h: Tensor
    low_up: Tensor | None
    low_down: Tensor | None


def experts_forward(
    hidden_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights, form: BlockForm
) -> tuple[Tensor, Kept]:
    """Return the output (T, H) in the dtype of `hidden_th`, and what backward needs."""
    dtype = _dtype(block, form)
    offsets = offsets_for(plan.offsets, dtype)
    x_sh = hidden_th.to(dtype).index_select(0, plan.token)
    h_sf = grouped_mm(x_sh, _in_out(block.gate_up, form.gate_up_packed, form), offsets)
    low_up = _add_low_rank(h_sf, x_sh, block.gate_up_a, block.gate_up_b, form.gate_up_scale, offsets)
    del x_sh
    a_si = gate_forward(h_sf, block.gate_up_bias, plan.expert, form.gate)
    y_sh = grouped_mm(a_si, _in_out(block.down, form.down_packed, form), offsets)
    low_down = _add_low_rank(y_sh, a_si, block.down_a, block.down_b, form.down_scale, offsets)
    out = combine(
        y_sh, plan.inverse, weights_tk, bias_eh=block.down_bias, ids_tk=_ids(plan, block), dtype=hidden_th.dtype
    )
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
    need_hidden, need_weights, *need_block = needed
    need = ExpertNeeds(*need_block)
    dtype = _dtype(block, form)
    offsets = offsets_for(plan.offsets, dtype)

    # Down: the product comes before the routing weight, which `gate_backward` applies.
    grad_cast_th = grad_th.to(dtype)
    g_sh = grad_cast_th.index_select(0, plan.token)
    grad_a_si, low_down = _input_grad(
        g_sh, block.down, form.down_packed, block.down_a, block.down_b, form.down_scale, form, offsets
    )
    weight_s = plan.sorted_weights(weights_tk)
    grad_h_sf, weighted_a_si, grad_weight_s = gate_backward(
        kept.h, block.gate_up_bias, plan.expert, form.gate, grad_a_si, weight_s
    )
    del grad_a_si
    weighted_low = None if kept.low_down is None else (kept.low_down * weight_s.unsqueeze(1)).to(dtype)
    down, down_a, down_b = _stack_grads(
        weighted_a_si, g_sh, low_down, weighted_low, form.down_scale, need.down_stack, form, offsets
    )
    down_bias = grouped_sum(g_sh, offsets, weight_s) if need.down_bias else None
    del g_sh, weighted_a_si
    grad_weights = _weights_grad(grad_weight_s, grad_cast_th, weights_tk, plan, block) if need_weights else None

    # Gate and up.
    grad_x_sh, low_up = _input_grad(
        grad_h_sf,
        block.gate_up,
        form.gate_up_packed,
        block.gate_up_a,
        block.gate_up_b,
        form.gate_up_scale,
        form,
        offsets,
        need_hidden,
    )
    grad_hidden = None if grad_x_sh is None else combine(grad_x_sh, plan.inverse, dtype=hidden_th.dtype)
    del grad_x_sh
    gate_up_bias = grouped_sum(grad_h_sf, offsets) if need.gate_up_bias else None
    gate_up = gate_up_a = gate_up_b = None
    if any(need.gate_up_stack):
        x_sh = hidden_th.to(dtype).index_select(0, plan.token)
        gate_up, gate_up_a, gate_up_b = _stack_grads(
            x_sh, grad_h_sf, low_up, kept.low_up, form.gate_up_scale, need.gate_up_stack, form, offsets
        )
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


def _in_out(stored: Tensor, packed: Packed | None, form: BlockForm) -> Tensor:
    """Return the stack as (E, in, out)."""
    weight = stored if packed is None else packed.dense(stored)
    return weight if form.transposed else weight.transpose(1, 2)


def _stack_grads(
    x_sk: Tensor,
    grad_sn: Tensor,
    low_grad_sr: Tensor | None,
    low_sr: Tensor | None,
    scale: float,
    need: tuple[bool, bool, bool],
    form: BlockForm,
    offsets_e: Offsets,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a stack and of its two low-rank factors, each only where needed.

    Args:
        x_sk: input of the projection.
        grad_sn: gradient of its output.
        low_grad_sr: gradient of the low-rank activation, from `_input_grad`.
        low_sr: the low-rank activation.
    """
    weight = a = b = None
    if need[0]:
        weight = grouped_outer(x_sk, grad_sn, offsets_e) if form.transposed else grouped_outer(grad_sn, x_sk, offsets_e)
    if need[1] and low_grad_sr is not None:
        a = grouped_outer(low_grad_sr, x_sk, offsets_e)
    if need[2] and low_sr is not None:
        b = grouped_outer(low_sr * scale, grad_sn, offsets_e)
    return weight, a, b


def _input_grad(
    grad_sn: Tensor,
    stored: Tensor,
    packed: Packed | None,
    a_erk: Tensor | None,
    b_ern: Tensor | None,
    scale: float,
    form: BlockForm,
    offsets_e: Offsets,
    needed: bool = True,
) -> tuple[Any, Tensor | None]:
    """Return the gradient (S, K) of a projection's input, None if not needed, and (S, r) of its low-rank activation."""
    low_sr = None if b_ern is None else grouped_mm(grad_sn, b_ern.transpose(1, 2), offsets_e).mul_(scale)
    if not needed:
        return None, low_sr
    grad_sk = grouped_mm(grad_sn, _in_out(stored, packed, form).transpose(1, 2), offsets_e)
    if low_sr is not None and a_erk is not None:
        grad_sk.add_(grouped_mm(low_sr, a_erk, offsets_e))
    return grad_sk, low_sr


def _weights_grad(
    grad_weight_s: Tensor, grad_th: Tensor, weights_tk: Tensor, plan: RoutingPlan, block: ExpertWeights
) -> Tensor:
    grad = grad_weight_s.index_select(0, plan.inverse.reshape(-1)).view(weights_tk.shape)
    ids_tk = _ids(plan, block)
    if block.down_bias is not None and ids_tk is not None:
        grad = grad + bias_weight_grad(grad_th, block.down_bias, ids_tk)
    return grad.to(weights_tk.dtype)


def _add_low_rank(
    out_sn: Tensor, x_sk: Tensor, a_erk: Tensor | None, b_ern: Tensor | None, scale: float, offsets_e: Offsets
) -> Tensor | None:
    """Add ``scale * (x a^T) b`` to ``out`` in place, without a dense delta of the weights; return ``x a^T`` (S, r)."""
    if a_erk is None or b_ern is None:
        return None
    low_sr = grouped_mm(x_sk, a_erk.transpose(1, 2), offsets_e)
    out_sn.add_(grouped_mm(low_sr, b_ern, offsets_e), alpha=scale)
    return low_sr


def _ids(plan: RoutingPlan, block: ExpertWeights) -> Tensor | None:
    """Return the (T, k) expert ids, None if there is no down bias to need them."""
    if block.down_bias is None:
        return None
    return plan.expert.index_select(0, plan.inverse.reshape(-1)).view(plan.inverse.shape)
