"""Liger's RMSNorm, rotary embedding and SwiGLU in single layers, for machines where nothing can be compiled.

`liger_kernel` itself replaces classes and functions of transformers' files, for every model of the process. Here the
forwards of the modules of given layers are set on the instances and taken away again. No list says which family takes
which kernel: norms are compared with the module's own forward here, whole layers by who measures them (`kind.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.hooks import has_global_hook, has_hooks

_ROWS = 64
# Both sides round a handful of times; another formula (an offset, a casting order) is off by more than 1.
_ROUNDINGS = 8


def missing(device: torch.device) -> str:
    """Why Liger cannot be used on `device`; empty where it can."""
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install 'fastpack-trl[liger]'"
    return "" if device.type == "cuda" else f"Liger's kernels need a GPU, the layers are on {device.type}"


@contextlib.contextmanager
def liger_modules(layers: list[Any]) -> Iterator[list[str]]:
    """Liger's forwards in the modules of `layers` that look like theirs; yields the classes that were replaced.

    They run with gradients only: evaluation and `generate` stay as they are.

    Args:
        layers: decoder layers of one kind, on one CUDA device; the first is compared.
    """
    made: list[tuple[str, Callable[[Any], Any]]] = []
    for name, module in layers[0].named_modules():
        make = _replacement(module)
        if make is not None:
            made.append((name, make))
    installed: list[nn.Module] = []
    try:
        for layer in layers:
            for name, make in made:
                module = layer.get_submodule(name)
                module.forward = MethodType(make(module), module)
                installed.append(module)
        yield sorted({type(layers[0].get_submodule(name)).__name__ for name, _ in made})
    finally:
        for module in installed:
            del module.forward


def _replacement(module: nn.Module) -> Callable[[Any], Any] | None:
    """What makes the forward of a module like this one; None where no kernel is right for it."""
    name = type(module).__name__
    if "forward" in module.__dict__ or name.startswith("Liger"):
        return None  # replaced by somebody else
    weight = getattr(module, "weight", None)
    if "RMSNorm" in name and isinstance(weight, Tensor) and weight.dim() == 1:
        return next((make for make in (_llama_norm, _gemma_norm) if _norms_agree(module, make)), None)
    if isinstance(getattr(module, "act_fn", None), nn.SiLU) and _has(module, "gate_proj", "up_proj", "down_proj"):
        return _swiglu
    names = getattr(type(module).forward, "__globals__", {})
    return _rotary if "apply_rotary_pos_emb" in names and hasattr(module, "layer_idx") else None


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _norm(module: Any, offset: float, casting: str) -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 1e-6

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return type(self).forward(self, hidden_states)
        # Not in place: the gradient that it would be written into belongs to the residual as well.
        return LigerRMSNormFunction.apply(hidden_states, self.weight, epsilon, offset, casting, False)

    return forward


def _llama_norm(module: Any) -> Callable[..., Any]:
    return _norm(module, 0.0, "llama")


def _gemma_norm(module: Any) -> Callable[..., Any]:
    return _norm(module, 1.0, "gemma")


def _norms_agree(module: Any, make: Callable[[Any], Any]) -> bool:
    """Forward and both gradients on random rows, within a few roundings of the module's dtype."""
    weight = module.weight
    draw = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(_ROWS, weight.numel(), device=weight.device, dtype=weight.dtype, generator=draw)
    seen = []
    for forward in (make(module), type(module).forward):
        values = rows.clone().requires_grad_()
        with torch.enable_grad():
            out = forward(module, values)
            inputs = [values, weight] if weight.requires_grad else [values]
            seen.append([out, *torch.autograd.grad(out, inputs, rows.to(out.dtype))])
    bound = _ROUNDINGS * torch.finfo(weight.dtype).eps
    return all(
        ours.dtype == own.dtype and bool((ours - own).norm() <= bound * own.norm())
        for ours, own in zip(*seen, strict=True)
    )


def _swiglu(module: Any) -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hooked = has_hooks(self.act_fn) or has_global_hook()  # which the kernel would leave out
        if args or kwargs or hooked or not torch.is_grad_enabled():
            return type(self).forward(self, hidden_states, *args, **kwargs)
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states)))

    return forward


def _rotary(module: Any) -> Callable[..., Any]:
    from liger_kernel.ops.rope import LigerRopeFunction

    own: Any = type(module).forward
    stock = own.__globals__["apply_rotary_pos_emb"]

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not torch.is_grad_enabled():
            return stock(query, key, cos, sin, *args, **kwargs)
        return LigerRopeFunction.apply(query, key, cos, sin)

    # The same code over the names of its file, one of them exchanged: the attention reads the function as a global.
    return FunctionType(
        own.__code__, own.__globals__ | {"apply_rotary_pos_emb": rotate}, "forward", own.__defaults__, own.__closure__
    )
