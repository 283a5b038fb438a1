"""Gated activation of a dense MLP, ``act(gate) * up``; backward computes the activation again.

`fastpack_trl.kernels.gate` is the form for experts, with biases and routing weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels._triton import runs_triton
from fastpack_trl.kernels.fused_form import GatedForm


def gated(gate: Tensor, up: Tensor | None, form: GatedForm) -> Tensor:
    """Return ``act(gate) * up``, (..., width) and contiguous; without `up`, `gate` has both, (..., 2 width)."""
    out: Tensor = _Gated.apply(gate, up, form)
    return out


def activate(x: Tensor, form: GatedForm) -> tuple[Tensor, Tensor]:
    """Return the activation of x and its derivative."""
    if form.act in ("relu", "relu2"):
        positive = x.relu()
        return (positive, (x > 0).to(x.dtype)) if form.act == "relu" else (positive * positive, 2 * positive)
    if form.act == "gelu":
        share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * share, share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if form.act == "gelu_tanh":
        scale = math.sqrt(8 / math.pi)
        share = torch.sigmoid(scale * (x + 0.044715 * x * x * x))
        return x * share, share + x * share * (1 - share) * scale * (1 + 3 * 0.044715 * x * x)
    share = torch.sigmoid(form.alpha * x)
    return x * share, share + form.alpha * x * share * (1 - share)


def gated_forward(gate: Tensor, up: Tensor, form: GatedForm) -> Tensor:
    """Return ``act(gate) * up``; both may be views of one tensor."""
    if runs_triton(gate, up):
        from fastpack_trl.kernels.gated_triton import gated_forward_triton

        return gated_forward_triton(gate, up, form)
    x = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (activate(x, form)[0] * up).to(gate.dtype).contiguous()


def gated_backward(
    gate: Tensor, up: Tensor, grad: Tensor, into: tuple[Tensor, Tensor], form: GatedForm
) -> tuple[Tensor, Tensor]:
    """Write the gradients of gate and up to `into` and return them."""
    if runs_triton(gate, up, grad):
        from fastpack_trl.kernels.gated_triton import gated_backward_triton

        return gated_backward_triton(gate, up, grad, into, form)
    value, slope = activate(gate.to(torch.promote_types(gate.dtype, torch.float32)), form)
    return into[0].copy_(grad * slope * up), into[1].copy_(grad * value)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Any, form: GatedForm) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.form = form
        return gated_forward(*(form.halves(gate) if up is None else (gate, up)), form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dense, form = torch.contiguous_format, ctx.form
        of_gate = torch.empty_like(gate, memory_format=dense)
        if up is None:
            gate, up = form.halves(gate)
            gated_backward(gate, up, grad, form.halves(of_gate), form)
            return of_gate, None, None
        return *gated_backward(gate, up, grad, (of_gate, torch.empty_like(up, memory_format=dense)), form), None
