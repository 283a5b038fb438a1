"""Bias and gate activation of an experts block, forward and backward.

A block's first projection gives gate and up halves, concatenated or interleaved. Two forms have formulas here; every
other gate runs through the model's own function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.kernels._triton import runs_triton


@dataclass(frozen=True, slots=True)
class Gate:
    """How a block makes ``a`` (S, I) from the pre-activation ``h`` (S, 2I).

    Attributes:
        kind: ``silu``: ``silu(gate) * up``; ``clamped``: gpt-oss' form, ``(up + 1) * gate * sigmoid(alpha * gate)``
            with gate clamped from above and up from both sides at `limit`; ``own``: the model's function.
        interleaved: gate and up alternate (``h[:, ::2]``, ``h[:, 1::2]``) instead of lying in halves.
        alpha, limit: of ``clamped``.
        own: the model's function of ``h``, for ``own``.
    """

    kind: Literal["silu", "clamped", "own"]
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    own: Callable[[Tensor], Tensor] | None = None

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gate and up."""
        if self.interleaved:
            return h[:, ::2], h[:, 1::2]
        middle = h.shape[1] // 2
        return h[:, :middle], h[:, middle:]


def gate_forward(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate) -> Tensor:
    """``a`` (S, I) from the pre-activation without bias.

    Args:
        h_sf: (S, 2I), rows sorted by expert.
        bias_ef: (E, 2I) or None.
        expert_s: (S,) int32, the expert of each row.
        gate: the form.
    """
    if gate.own is None and runs_triton(h_sf, bias_ef):
        from fastpack_trl.kernels.gate_triton import gate_forward_triton

        return gate_forward_triton(h_sf, bias_ef, expert_s, gate)
    return gate_forward_torch(h_sf, bias_ef, expert_s, gate)


def gate_forward_torch(h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate) -> Tensor:
    """The torch twin of `gate_forward`."""
    h_sf = _with_bias(h_sf, bias_ef, expert_s)
    if gate.own is not None:
        return gate.own(h_sf)
    first, up = gate.halves(h_sf)
    if gate.kind == "silu":
        return F.silu(first).mul_(up)
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return torch.sigmoid(first * gate.alpha).mul_(first).mul_(up.add_(1))


def gate_backward(
    h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate, grad_a_si: Tensor, weight_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of ``weight * a``: the routing weight is applied here, so that no second down product is needed for its
    gradient.

    Args:
        h_sf, bias_ef, expert_s, gate: as in `gate_forward`.
        grad_a_si: (S, I), gradient of the *weighted* activation.
        weight_s: (S,), routing weight of each row, in any float dtype.

    Returns:
        gradient of ``h`` (S, 2I); ``weight * a`` (S, I); gradient of the weight (S,), fp32 or wider.
    """
    if gate.own is None and runs_triton(h_sf, bias_ef, grad_a_si, weight_s):
        from fastpack_trl.kernels.gate_triton import gate_backward_triton

        return gate_backward_triton(h_sf, bias_ef, expert_s, gate, grad_a_si, weight_s)
    return gate_backward_torch(h_sf, bias_ef, expert_s, gate, grad_a_si, weight_s)


def gate_backward_torch(
    h_sf: Tensor, bias_ef: Tensor | None, expert_s: Tensor, gate: Gate, grad_a_si: Tensor, weight_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch twin of `gate_backward`."""
    h_sf = _with_bias(h_sf, bias_ef, expert_s)
    weight = weight_s.unsqueeze(1)
    if gate.own is not None:
        return _own_backward(h_sf, gate.own, grad_a_si, weight)
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
    """The gradient where ``low < x < high``, else zero; at the bounds themselves as the installed torch has it."""
    if passes_at_bounds():
        low, high = (
            float(np.nextafter(np.float32(bound), np.float32(far))) for bound, far in ((low, -np.inf), (high, np.inf))
        )
    torch.ops.aten.hardtanh_backward.grad_input(grad, x, low, high, grad_input=out)


@functools.cache
def passes_at_bounds() -> bool:
    """Whether torch's `clamp` has a gradient where its input is a bound: in 2.13 it has, in 2.15 it has not."""
    with torch.inference_mode(False), torch.enable_grad():
        bound = torch.ones(1, requires_grad=True)
        (grad,) = torch.autograd.grad(bound.clamp(-1.0, 1.0), bound)
    return bool(grad)


def _own_backward(
    h_sf: Tensor, own: Callable[[Tensor], Tensor], grad_a_si: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaf = h_sf.detach().requires_grad_()
        a = own(leaf)
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
