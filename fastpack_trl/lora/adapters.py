"""Adapters in the compute dtype, cast once per forward of the backbone instead of once per projection.

PEFT keeps adapters in fp32 over a 16-bit base, and autocast casts each matrix at its use: two small kernels per
projection forward, two backward, and again on recompute. Here all of them are cast together, the scaling multiplied
into B, and their gradients are cast back together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.model.checkpoint_seam import checkpointing_modules, checkpoints_reentrantly
from fastpack_trl.model.hooks import has_gradient_hooks, in_backward


class CastAdapter(NamedTuple):
    """The adapter of one projection as its forward reads it."""

    a: Tensor
    """(rank, in_features) in the compute dtype."""
    b: Tensor
    """(out_features, rank) in the compute dtype, times the scaling."""
    made_from: tuple[Tensor, Tensor, int, int, float]
    """The parameters A and B, their versions and the scaling at the time of the cast."""
    spent: list[bool]
    """Not empty once a backward pass has reached the adapters: an optimizer step may follow, and fused optimizers do
    not increase a parameter's version. Then only a recompute in a backward pass may read this cast."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model casts its own adapters

    def serves(self, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> bool:
        """Return whether the cast is up to date."""
        if self.a.dtype != dtype or self.made_from[0] is not a or self.made_from[1] is not b:
            return False
        if torch.compiler.is_compiling():  # inside a compiled layer the backbone's hook has just run
            return torch.is_grad_enabled() or not self.spent
        if self.spent and not in_backward():
            return False  # a layer that is called on its own, past the backbone's hook
        return self.made_from[2:] == (a._version, b._version, scaling)


def is_sharded(parameter: Any) -> bool:
    """Return whether a parameter is a DTensor: under FSDP 2, while its module is not gathered."""
    return hasattr(parameter, "full_tensor")


def cast_together(
    modules: Sequence[Any], adapters: Sequence[tuple[Tensor, Tensor, float]], dtype: torch.dtype, *, adds_up: bool
) -> None:
    """Set ``module.fastpack_cast`` of each module from its (A, B, scaling), until the next forward of the backbone.

    The cast remains after a backward pass has reached it: another forward may wait for its backward, and a recompute
    under selective checkpointing must not cast if its forward did not. `adds_up`: see `CastHook`.
    """
    scalings = [scaling for _, _, scaling in adapters]
    parameters = [tensor for a, b, _ in adapters for tensor in (a, b)]
    spent: list[bool] = []
    # First, because the node that adds to a parameter's gradient lives as long as a cast and keeps its stream.
    clear(modules)
    casts = _CastTogether.apply(dtype, scalings, spent, adds_up, *parameters)
    for index, (module, (a, b, scaling)) in enumerate(zip(modules, adapters, strict=True)):
        made_from = (a, b, a._version, b._version, scaling)
        # Bypass `nn.Module.__setattr__`, which looks for parameters: this runs for every projection in every step.
        module.__dict__["fastpack_cast"] = CastAdapter(casts[2 * index], casts[2 * index + 1], made_from, spent)


def clear(modules: Sequence[Any]) -> None:
    for module in modules:
        module.__dict__["fastpack_cast"] = None


class _CastTogether(torch.autograd.Function):
    """Return A_1, B_1, A_2, B_2, ... in `dtype`, every B times its scaling, by a few multi-tensor kernels."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, scalings: list[float], spent: list[bool], adds_up: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.adds_to = parameters if adds_up else ()
        ctx.scalings, ctx.spent, ctx.dtypes = scalings, spent, [tensor.dtype for tensor in parameters]
        scaled = torch._foreach_mul(parameters[1::2], scalings)
        sources = [tensor for pair in zip(parameters[::2], scaled, strict=True) for tensor in pair]
        casts = [torch.empty_like(tensor, dtype=dtype) for tensor in sources]
        casts[::2] = _below_each_other(casts[::2])
        torch._foreach_copy_(casts, sources)
        return tuple(casts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.spent[:] = [True]
        present = [index for index, grad in enumerate(grads) if grad is not None]
        if not present:
            return (None, None, None, None, *grads)
        results = {index: torch.empty_like(grads[index], dtype=ctx.dtypes[index]) for index in present}
        torch._foreach_copy_([*results.values()], [grads[index] for index in present])
        if of_b := [index for index in present if index % 2]:
            torch._foreach_mul_([results[index] for index in of_b], [ctx.scalings[index // 2] for index in of_b])
        if ctx.adds_to:
            _add_up(ctx.adds_to, results)
        return (None, None, None, None, *[results.get(index) for index in range(len(grads))])


def _below_each_other(matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield empty matrices like `matrices`; neighbors of one width lie in one buffer, for `nodes.stacked`."""
    for width, group in groupby(matrices, key=lambda each: each.shape[1]):
        rows, likes = zip(*((each.shape[0], each) for each in group), strict=True)
        # `unsafe`: without the tracking of views, which would replace the node of each by that of the buffer.
        yield from likes[0].new_empty(sum(rows), width).unsafe_split_with_sizes(rows)


def _add_up(parameters: Sequence[Tensor], gradients: dict[int, Tensor]) -> None:
    """Add gradients, by the index of their parameter, to existing ones in one multi-tensor kernel, and remove them.

    Left to autograd: parameters without a gradient, frozen, with hooks, or used more than once.
    """
    owners = Counter(id(parameters[index]) for index in gradients)
    added = [
        index
        for index, gradient in gradients.items()
        if (parameter := parameters[index]).requires_grad
        and (held := parameter.grad) is not None
        and not has_gradient_hooks(parameter)
        and owners[id(parameter)] == 1
        and held.layout is torch.strided
        and (held.dtype, held.device, held.shape) == (gradient.dtype, gradient.device, gradient.shape)
    ]
    if added:
        held = [parameters[index].grad for index in added]
        torch._foreach_add_(held, [gradients.pop(index) for index in added])


class CastHook:
    """Pre-hook of the backbone: casts the adapters of all its layers together in each forward with gradients.

    Each forward casts again, because fused optimizers change parameters without increasing their version.

    Layers under reentrant checkpointing cast separately: each has its own backward pass, and every pass would reach the
    one node of the cast. It has no gradient for other layers' adapters, but autograd calls their hooks anyway; DDP
    considers a parameter ready once its hook was called and never reduces later gradients.

    Args:
        modules: LoRA layers with the fast forward.
        begin: called first, in every forward of the backbone with gradients.

    Attributes:
        adds_up: whether backward passes add to existing gradients themselves, which requires that nothing else reads
            gradients or their accumulation (`torch.autograd.grad`, DDP).
    """

    def __init__(self, modules: list[Any], backbone: nn.Module, begin: Callable[[], None]) -> None:
        self.modules, self.adds_up, self.begin = modules, False, begin
        self._checkpointing = checkpointing_modules(backbone)

    def __call__(self, backbone: nn.Module, _args: Any) -> None:
        # The compiler of a whole model fuses the casts; layers of a replica of `nn.DataParallel` are not in this list.
        if torch.compiler.is_compiling() or getattr(backbone, "_is_replica", False):
            return
        if not torch.is_grad_enabled():
            return  # keep the casts: an earlier forward may wait for its backward and for a recompute in it
        self.begin()
        if any(map(checkpoints_reentrantly, self._checkpointing)):
            clear(self.modules)
            return
        todo: dict[Any, tuple[list[Any], list[tuple[Tensor, Tensor, float]]]] = {}
        for module in self.modules:
            pair = module.fastpack_active_adapter()
            if pair is None or is_sharded(pair[0]):  # under FSDP 2 each layer casts its adapters after gathering them
                continue
            a, _, scaling = pair
            device = a.device.type
            dtype = torch.get_autocast_dtype(device) if autocasts(device) else a.dtype
            if a.dtype == dtype and scaling == 1:
                continue
            modules, adapters = todo.setdefault((a.device, dtype), ([], []))
            modules.append(module)
            adapters.append(pair)
        for (_, dtype), (modules, adapters) in todo.items():
            cast_together(modules, adapters, dtype, adds_up=self.adds_up)


def autocasts(device_type: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # `is_autocast_enabled` raises for meta
