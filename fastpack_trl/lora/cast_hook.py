"""The hook of a backbone that casts the adapters of all its layers, before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.lora.adapters import autocasts, cast_together, clear, is_sharded, needs_cast
from fastpack_trl.lora.joined_casts import cast_joined
from fastpack_trl.lora.siblings import Siblings
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
        siblings: those of them that read one input.

    Attributes:
        adds_up: backward passes add all gradients that are there to by themselves: only where whoever runs them knows
            that nobody else asks for gradients, or for the accumulation of one (`torch.autograd.grad`, DDP).
    """

    def __init__(self, modules: list[Any], backbone: nn.Module, siblings: Sequence[Siblings] = ()) -> None:
        self.modules, self.siblings, self.adds_up = modules, siblings, False
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
        joined = self._joined()
        for module in self.modules:
            if id(module) in joined:
                continue
            pair = module.fastpack_active_adapter()
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
            cast_together(modules, adapters, dtype, adds_up=self.adds_up)

    def _joined(self) -> set[int]:
        """Cast groups of siblings that may be joined in this forward; return the ids of their modules."""
        todo: dict[Any, tuple[list[list[Any]], list[list[tuple[Tensor, Tensor, float]]]]] = {}
        clear(self.modules)
        for siblings in filter(None, self.siblings):  # a copy of the model has None
            siblings.forget()
            adapters = [module.fastpack_active_adapter() for module in siblings.modules]
            pairs = [pair for pair in adapters if pair is not None and not is_sharded(pair[0])]
            kinds = {(tensor.device, tensor.dtype) for a, b, _ in pairs for tensor in (a, b)}
            if siblings.alone or len(pairs) < len(adapters) or len(kinds) > 1 or siblings.are_checkpointed:
                continue
            (kind,) = kinds
            groups, of_groups = todo.setdefault(kind, ([], []))
            groups.append(siblings.modules)
            of_groups.append(pairs)
        for (device, dtype), (groups, of_groups) in todo.items():
            dtype = torch.get_autocast_dtype(device.type) if autocasts(device.type) else dtype
            cast_joined(groups, of_groups, dtype, adds_up=self.adds_up)
        return {id(module) for groups, _ in todo.values() for group in groups for module in group}
