"""The hook of a backbone that casts the adapters of all its layers together, once per forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.lora.adapters import cast_together, clear, is_sharded, needs_cast
from fastpack_trl.model.checkpoint_seam import checkpointing_modules, checkpoints_reentrantly


class CastHook:
    """Pre-hook of the backbone: casts the adapters of all its layers together where it runs with gradients.

    In each forward anew: fused optimizers change parameters without counting their version up, so nothing tells that an
    earlier cast still holds.

    Not where layers are checkpointed with reentry: each has a backward pass of its own then, and all of them would come
    through the one node of the cast. It has no gradient for other layers' adapters, but autograd calls the hooks of
    these all the same, and DDP takes a parameter whose hook was called for ready and never reduces what comes later.

    Args:
        modules: LoRA layers with the fast forward.
        backbone: where the hook is registered.
    """

    def __init__(self, modules: list[Any], backbone: nn.Module) -> None:
        self.modules = modules
        self._checkpointing = checkpointing_modules(backbone)

    def __call__(self, backbone: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a model compiled as a whole fuses the casts by itself
        if getattr(backbone, "_is_replica", False):
            return  # of `nn.DataParallel`: its layers are not those of this list
        if not torch.is_grad_enabled():
            return  # casts stay: a forward before this one may wait for its backward, and for a recompute in it
        if any(map(checkpoints_reentrantly, self._checkpointing)):
            clear(self.modules)
            return
        todo: dict[Any, tuple[list[Any], list[tuple[Tensor, Tensor, float]]]] = {}
        for module in self.modules:
            pair = adapter_of(module)
            if pair is None or is_sharded(pair[0]):  # under FSDP 2 a layer casts its own, when they are gathered
                continue
            a, _, scaling = pair
            device = a.device.type
            dtype = torch.get_autocast_dtype(device) if autocasts(device) else a.dtype
            if not needs_cast(a, scaling, dtype):
                continue
            modules, adapters = todo.setdefault((a.device, dtype), ([], []))
            modules.append(module)
            adapters.append(pair)
        for (_, dtype), (modules, adapters) in todo.items():
            cast_together(modules, adapters, dtype)


def adapter_of(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return A, B and the scaling of the one adapter that a LoRA layer runs with; None where that is not one."""
    names = layer.active_adapters
    if len(names) != 1 or layer.disable_adapters or layer.merged:
        return None
    first = layer._modules["lora_A"]._modules.get(names[0])
    if first is None:
        return None
    a = first._parameters.get("weight")
    b = layer._modules["lora_B"]._modules[names[0]]._parameters.get("weight")
    return None if a is None or b is None else (a, b, float(layer.scaling[names[0]]))


def autocasts(device_type: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # meta has no autocast: asking raises
