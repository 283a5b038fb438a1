"""Bias and gate activation of an experts block, forward and backward.

Two forms of `Gate` have formulas here; every other gate runs through the model's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.kernels._triton import runs_triton
from fastpack_trl.kernels.gate_form import Gate, passes_at_bounds


def gate_forward(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate) -> Tensor:
    """Return ``a`` (S, I) from the pre-activation without bias.

    Args:
        h_sf: (S, 2I), rows sorted by expert.
        bias_ef: (E, 2I) or None.
        expert_s: (S,) int32, the expert of each row.
        gate: the form.
    """
    if gate.function is None and runs_triton(h_sf, bias_ef):
        from fastpack_trl.kernels.gate_triton import gate_forward_triton

        return gate_forward_triton(h_sf, bias_ef, expert_s, gate)
    h_sf = _with_bias(h_sf, bias_ef, expert_s)
    if gate.function is not None:
        return gate.function(h_sf)
    first, up = gate.halves(h_sf)
    if gate.kind == "silu":
        return F.silu(first).mul_(up)
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return torch.sigmoid(first * gate.alpha).mul_(first).mul_(up.add_(1))


def gate_backward(
    h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate, grad_a_si: Tensor, weight_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``weight * a``: with the routing weight applied here, its own gradient needs no second
    down product.

    Args:
        h_sf, bias_ef, expert_s, gate: as in `gate_forward`.
        grad_a_si: (S, I), gradient of the *weighted* activation.
        weight_s: (S,), routing weight of each row, in any float dtype.

    Returns:
        Gradient of ``h`` (S, 2I); ``weight * a`` (S, I); gradient of the weight (S,), fp32 or wider.
    """
    if gate.function is None and runs_triton(h_sf, bias_ef, grad_a_si, weight_s):
        from fastpack_trl.kernels.gate_triton import gate_backward_triton

        return gate_backward_triton(h_sf, bias_ef, expert_s, gate, grad_a_si, weight_s)
    h_sf = _with_bias(h_sf, bias_ef, expert_s)
    weight = weight_s.unsqueeze(1)
    if gate.function is not None:
        return _backward_of_function(h_sf, gate.function, grad_a_si, weight)
    first, up = gate.halves(h_sf)
    grad_h = torch.empty_like(h_sf)
    grad_first, grad_up = gate.halves(grad_h)
    grad_a = _scaled(grad_a_si, weight)
    if gate.kind == "silu":
        activated = F.silu(first)
        torch.mul(grad_a, activated, out=grad_up)
        a = activated.mul_(up)
        torch.ops.aten.silu_backward.grad_input(grad_a.mul_(up), first, grad_input=grad_first)
    else:
        clamped, clamped_up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        sigmoid = torch.sigmoid(clamped * gate.alpha)
        activated = clamped.mul_(sigmoid)
        _clamp_backward(grad_a * activated, up, -gate.limit, gate.limit, grad_up)
        # d(x s) / dx = s + alpha x s (1 - s), with s = sigmoid(alpha x)
        slope = torch.addcmul(activated, activated, sigmoid, value=-1).mul_(gate.alpha).add_(sigmoid)
        clamped_up += 1
        a = activated.mul_(clamped_up)
        _clamp_backward(grad_a.mul_(clamped_up).mul_(slope), first, -math.inf, gate.limit, grad_first)
    grad_weight = _row_dot(grad_a_si, a)
    return grad_h, _scaled_(a, weight), grad_weight


def _clamp_backward(grad: Tensor, x: Tensor, low: float, high: float, out: Tensor) -> None:
    """Write the gradient where ``low < x < high``, else zero; at the bounds as the installed torch has it."""
    if passes_at_bounds():
        low, high = (
            float(np.nextafter(np.float32(bound), np.float32(far))) for bound, far in ((low, -np.inf), (high, np.inf))
        )
    torch.ops.aten.hardtanh_backward.grad_input(grad, x, low, high, grad_input=out)


def _backward_of_function(
    h_sf: Tensor, function: Callable[[Tensor], Tensor], grad_a_si: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaf = h_sf.detach().requires_grad_()
        a = function(leaf)
        (grad_h,) = torch.autograd.grad(a, leaf, _scaled(grad_a_si, weight))
    a = a.detach()
    return grad_h, _scaled(a, weight), _row_dot(grad_a_si, a)


def _with_bias(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor) -> Tensor:
    return h_sf if bias_ef is None else bias_ef.index_select(0, expert_s).add_(h_sf)


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    # A wider routing weight (fp32 in DeepSeek's routers) is not rounded before the product.
    return (x * weight).to(x.dtype)


def _scaled_(x: Tensor, weight: Tensor) -> Tensor:
    return x.mul_(weight) if weight.dtype == x.dtype else _scaled(x, weight)


def _row_dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
