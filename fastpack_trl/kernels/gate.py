"""Bias and gate activation of an experts block, forward and backward.

Two forms of `Gate` have kernels. Every other gate, and a device without Triton, uses `Gate.activation` and autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack_trl.kernels._triton import runs_triton
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.kernels.operators import recording


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
    return gate.activation(_with_bias(h_sf, bias_ef, expert_s))


def gate_backward(
    h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate, grad_a_si: Tensor, weight_s: Tensor,
    more_si: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``weight * a``, so that the routing weight's gradient needs no second down projection.

    Args:
        h_sf, bias_ef, expert_s, gate: as in `gate_forward`.
        grad_a_si: (S, I), gradient of the *weighted* activation.
        weight_s: (S,), routing weight of each row, in any float dtype.
        more_si: (S, I), a second addend of `grad_a_si`, such as that of LoRA.

    Returns:
        Gradient of ``h`` (S, 2I); ``weight * a`` (S, I); gradient of the weight (S,), fp32 or wider.
    """
    if gate.function is None and runs_triton(h_sf, bias_ef, grad_a_si, weight_s, more_si):
        from fastpack_trl.kernels.gate_triton import gate_backward_triton

        return gate_backward_triton(h_sf, bias_ef, expert_s, gate, grad_a_si, weight_s, more_si)
    weight, dtype = weight_s.unsqueeze(1), grad_a_si.dtype
    grad_a_si = grad_a_si if more_si is None else grad_a_si + more_si
    with recording():
        leaf = _with_bias(h_sf, bias_ef, expert_s).detach().requires_grad_()
        a = gate.activation(leaf)
    # A wider routing weight (fp32 in DeepSeek's routers) is not rounded before the product.
    (grad_h,) = torch.autograd.grad(a, leaf, (grad_a_si * weight).to(dtype))
    a = a.detach()
    grad_weight = (grad_a_si * a).sum(1, dtype=torch.promote_types(dtype, torch.float32))
    return grad_h, (a * weight).to(dtype), grad_weight


def _with_bias(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor) -> Tensor:
    return h_sf if bias_ef is None else bias_ef.index_select(0, expert_s).add_(h_sf)
