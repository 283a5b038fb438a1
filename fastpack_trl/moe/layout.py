"""Read an experts module of transformers from its flags and a trial of its gate, never from shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.kernels.gate import gate_forward
from fastpack_trl.kernels.gate_form import Gate, passes_at_bounds
from fastpack_trl.model.hooks import users_hooks_off

STACKS = ("gate_up_proj", "down_proj")
_FLAGS = ("is_transposed", "has_bias", "has_gate", "num_experts", "config", "_apply_gate")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that transformers dispatches through its experts interface, keyed by name."""
    return {name: each for name, each in model.named_modules() if all(hasattr(each, flag) for flag in _FLAGS)}


def why_not(module: Any) -> Iterator[object]:
    """Yield why this module keeps transformers' path. Older versions lack some flags."""
    yield not module.has_gate and "experts without a gate"
    yield getattr(module, "has_post_expert_norm", False) and "a norm follows each expert"
    yield getattr(module, "_is_expert_parallel", False) and "expert parallel"
    children = (child for child in module.children() if not isinstance(child, nn.ModuleDict))  # parametrized stacks
    yield any(True for child in children for _ in child.parameters()) and "the gate has parameters of its own"
    for name in STACKS:
        if name in getattr(module, "parametrizations", ()):
            made_by = [type(step).__name__ for step in module.parametrizations[name]]
            yield made_by != ["Bnb4bitParametrization"] and f"{name} is parametrized by {', '.join(made_by)}"
            continue
        parameter = getattr(module, name, None)
        if parameter is None or parameter.ndim != 3:
            yield f"{name} is not a stack of matrices"
            return
        yield parameter.dtype not in _DTYPES and f"{name} is in {str(parameter.dtype).removeprefix('torch.')}"
        yield type(parameter.data).__name__ == "DTensor" and f"{name} is a DTensor"


def read_gate(module: Any) -> Gate:
    """Return the first of our formulas that gives the same values as the module's gate, else the module's function."""
    alpha, limit = _number(module, "alpha", 1.0), _number(module, "limit", 7.0)
    known = [Gate("silu")]
    known += [Gate("clamped", interleaved=interleaved, alpha=alpha, limit=limit) for interleaved in (True, False)]
    probe = torch.linspace(-3 * limit, 3 * limit, 254).view(2, 127).repeat(1, 2)[:, :252]
    probe = probe[:, torch.randperm(252, generator=torch.Generator().manual_seed(0))]
    expert = torch.zeros(2, dtype=torch.int32)
    passes_at_bounds()  # cached here instead of in the first backward pass
    with torch.no_grad(), users_hooks_off(module):
        expected: Tensor = module._apply_gate(probe)
        for gate in known:
            activation = gate_forward(probe, None, expert, gate)
            if activation.shape == expected.shape and torch.allclose(activation, expected, rtol=1e-5, atol=1e-6):
                return gate
    return Gate("model", function=module._apply_gate)


def _number(module: Any, name: str, default: float) -> float:
    values = (getattr(module, spelling, None) for spelling in (name, f"swiglu_{name}"))
    return float(next((value for value in values if isinstance(value, int | float)), default))
