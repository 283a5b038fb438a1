"""LoRA on expert stacks (PEFT's `target_parameters`) as grouped low-rank matmuls on the routed tokens.

PEFT builds ``W + scale * B A`` for the whole stack in each forward, and its dense gradient in backward. Here the
factors go to the experts function, which builds neither. PEFT's modules stay as they are, so adapters are saved,
loaded, merged and switched by PEFT itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.grouped import aligned_rank
from fastpack_trl.model.changes import Patch, hand_over, patch_attribute
from fastpack_trl.model.hooks import PartsHooked
from fastpack_trl.moe.block import LowRank, is_decoding, run_experts, traceable
from fastpack_trl.moe.layout import STACKS
from fastpack_trl.moe.quantized import read_stack, stack_dtype

logger = logging.get_logger(__name__)


@dataclass(slots=True)
class ExpertLora:
    """The LoRA of one experts module, under the name of its outermost PEFT wrapper."""

    name: str
    wrappers: list[Any]
    """PEFT's `ParamWrapper` of each adapted stack, outermost first."""
    module: Any
    """The experts module inside."""
    reason: str = ""
    """Why PEFT's own path runs; empty if ours does. Checked in each forward, because adapters may be disabled for a
    reference model, merged or added, and hooks may change."""
    hooked: PartsHooked = field(default_factory=PartsHooked)
    installed: Patch | None = None
    """All other changes of the model."""


@contextlib.contextmanager
def expert_lora(model: nn.Module) -> Iterator[list[ExpertLora]]:
    """Run LoRA on the stacks of supported experts through the experts function; restore PEFT's forward on exit."""
    adapters = list(_adapted(model))
    with contextlib.ExitStack() as stack:
        for adapter in adapters:
            outer = adapter.wrappers[0]
            adapter.reason = first_reason(_reasons_for_peft(adapter))
            if (before := vars(outer).get("forward")) is None:
                # On the instance: the class and all that PEFT reads stay unchanged. A method, because a compiled graph
                # compares its function, which is the same in every layer; other objects are compared by identity.
                # Named like the attribute: a pickled model refers to it by name, and to PEFT's when it is loaded.
                stack.enter_context(patch_attribute(outer, "_fastpack_expert_lora", adapter))
                stack.enter_context(patch_attribute(outer, "forward", MethodType(forward, outer)))
            elif getattr(before, "__func__", None) is not forward:  # otherwise it was applied before
                adapter.reason = "the wrapper's forward was replaced by other code"
        yield adapters


def _adapted(model: nn.Module) -> Iterator[ExpertLora]:
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        chain: list[Any] = []
        base: Any = module
        while hasattr(base, "parameter_name") and base not in inner:  # PEFT's ParamWrapper
            chain.append(base)
            inner.add(base)
            base = base.base_layer
        if chain and hasattr(base, "_fastpack_moe"):
            yield ExpertLora(name, chain, base)


def forward(outer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of the outermost wrapper: ours, or PEFT's if adapters or hooks need it."""
    adapter: ExpertLora = outer._fastpack_expert_lora
    reason = "called with keyword arguments"
    if not kwargs and len(args) == 2:
        reason = first_reason(_reasons_for_peft(adapter))
    if reason != adapter.reason and not torch.compiler.is_compiling():
        adapter.reason = reason
        if reason:
            hand_over(adapter.module, "moe", f"expert LoRA: peft ({reason})")
    # PEFT 0.21 fails from the second forward on if the stack is stored in 4 bits.
    decoding = is_decoding(adapter.module, hidden) and read_stack(adapter.module, STACKS[0])[1] is None
    if reason or decoding or not traceable(adapter.module._fastpack_moe):
        out: Tensor = type(outer).forward(outer, hidden, *args, **kwargs)
        return out
    factors = {wrapper.parameter_name: low_rank(wrapper, adapter.module) for wrapper in adapter.wrappers}
    return run_experts(adapter.module, hidden, args[0], args[1], factors)


def _reasons_for_peft(adapter: ExpertLora) -> Iterator[object]:
    module = adapter.module
    for wrapper in adapter.wrappers:
        yield wrapper.parameter_name not in STACKS and f"{wrapper.parameter_name} is adapted too"
        yield wrapper.disable_adapters and "adapters are disabled"
        yield wrapper.merged and "adapters are merged"
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        yield len(active) != 1 and f"{len(active)} adapters are active"
        yield wrapper.num_experts == 1 and "a single expert"
        yield active[0] in getattr(wrapper, "lora_variant", {}) and f"{active[0]!r} is a LoRA variant"
        # Older PEFT always reads a stack as (experts, in, out), which swaps the factors.
        swapped = bool(getattr(wrapper, "_did_swap_in_out_features", False)) == bool(module.is_transposed)
        yield swapped and "this PEFT version stores the factors in the other order"
    # PEFT's path would call these modules; ours does not.
    if adapter.hooked(module, *adapter.wrappers[1:], *module.children()):
        dense = read_stack(module, STACKS[0])[1] is None
        yield dense and "hooks on the experts module, inside of it or on every module"
        # PEFT 0.21 fails from the second forward on if the stack is stored in 4 bits.
        logger.warning_once("expert LoRA: hooks on experts in 4 bits do not run: PEFT's own path cannot train them")


def low_rank(wrapper: Any, module: Any) -> LowRank:
    """Return the active adapter of a PEFT wrapper as grouped factors, in the dtype of the stack.

    PEFT stores A as (E * r, in), experts slowest, and B as (out, r * E), experts fastest. The rank is padded with zeros
    to the alignment of torch's grouped GEMM.
    """
    (name,) = (active for active in wrapper.active_adapters if active in wrapper.lora_A)
    experts, dtype = wrapper.num_experts, stack_dtype(module, wrapper.parameter_name)
    weight_a, weight_b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    a = weight_a.to(dtype).view(experts, -1, weight_a.shape[1])
    b = weight_b.view(weight_b.shape[0], -1, experts).permute(2, 1, 0)
    b = b.to(dtype, memory_format=torch.contiguous_format)  # one copy
    if missing := aligned_rank(a.shape[1], dtype) - a.shape[1]:
        a, b = (nn.functional.pad(factor, (0, 0, 0, missing)) for factor in (a, b))
    return LowRank(a.contiguous(), b.contiguous(), float(wrapper.scaling[name]))


def router_adapters(model: nn.Module, experts: dict[str, nn.Module]) -> Iterator[str]:
    """Yield a warning if LoRA wraps the routers next to these experts: `target_modules="all-linear"` may do that."""
    inside = {name.split(".base_layer")[0].rpartition(".")[0] for name in experts}
    for name, module in model.named_modules():
        parent, _, router = name.rpartition(".")
        if parent in inside and router in ("gate", "router") and hasattr(module, "lora_A"):
            fix = "name target_modules and target_parameters instead of 'all-linear' unless that is meant"
            yield f"LoRA wraps the router ({router!r}): routing changes with the adapter; {fix}"
            return
