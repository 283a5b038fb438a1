"""Expert stacks in 4 bits: stored packed by bitsandbytes, dequantized for each use and never kept.

bitsandbytes' own parametrization dequantizes on access, so reading the parameter gives a dense stack, which autograd
would hold until backward. The experts function takes the packed stack and dequantizes it again in backward.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpack_trl.moe.layout import STACKS, experts_modules


def read_stack(module: Any, name: str) -> tuple[Any, Any]:
    """Return the dense parameter of a stack and None, or the packed one and bitsandbytes' `QuantState`."""
    parametrized = getattr(module, "parametrizations", None)
    if parametrized is not None and name in parametrized:
        (*_, last) = made_by = list(parametrized[name])
        if len(made_by) == 1 and type(last).__name__ == "Bnb4bitParametrization":
            return parametrized[name].original, last.quant_state
    return getattr(module, name, None), None


def stack_dtype(module: Any, name: str) -> torch.dtype:
    """Return the compute dtype of a stack."""
    stack, state = read_stack(module, name)
    dtype: torch.dtype = (stack if state is None else state).dtype
    return dtype


def expert_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the compute dtypes of the expert stacks of a model."""
    stacks = [(module, name) for module in experts_modules(model).values() for name in STACKS]
    return {stack_dtype(*stack) for stack in stacks if read_stack(*stack)[0] is not None}


class QuantizedExperts(NamedTuple):
    """Result of `quantize_experts`: ``96 stacks, 56.62 -> 15.04 GiB (nf4)``."""

    stacks: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return f"{self.stacks} stacks, {self.bytes_before / 2**30:.2f} -> {self.bytes_after / 2**30:.2f} GiB (nf4)"


def has_quantized_experts(model: nn.Module) -> bool:
    """Return whether a stack of this model is packed."""
    return any(read_stack(module, STACKS[0])[1] is not None for module in experts_modules(model).values())


def quantize_experts(model: nn.Module, device: torch.device | None = None) -> QuantizedExperts:
    """Quantize the expert stacks of `model` to NF4 with double quantization, in place, one stack at a time.

    bitsandbytes quantizes linear layers only; transformers 5 leaves the experts of a 4-bit model dense (bitsandbytes
    #1849). This cannot be reverted, and packed stacks stay on their device.

    Args:
        model: with expert stacks that are frozen.
        device: to which each stack is moved before it is packed, so that the dense stacks need not fit there together;
            None packs it where it is.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: the model has no experts, or a stack would be trained.
    """
    if find_spec("bitsandbytes") is None:
        raise ImportError("moe_quantize_experts needs bitsandbytes: pip install 'fastpack-trl[qlora]'")
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    modules = {name: module for name, module in experts_modules(model).items() if hasattr(module, STACKS[0])}
    if not modules:
        raise ValueError("moe_quantize_experts is on but the model has no expert stacks: switch it off")
    count = before = after = 0
    for name, module in modules.items():
        for stack in STACKS:
            dense, packed = read_stack(module, stack)
            if packed is not None:
                continue
            if dense.requires_grad:
                raise ValueError(
                    f"{name}.{stack} is trained and cannot be quantized: train LoRA on it "
                    f"(LoraConfig(target_parameters=['{stack}'])), freeze it, or set moe_quantize_experts='off'"
                )
            before += dense.nbytes
            if device is not None:
                dense.data = dense.data.to(device)
            replace_parameter_4bit(module, stack, compress_statistics=True, quant_type="nf4")
            stored, state = read_stack(module, stack)
            scales = [state.absmax, *([state.state2.absmax, state.offset] if state.nested else [])]
            after += stored.nbytes + sum(int(tensor.nbytes) for tensor in scales)
            count += 1
    return QuantizedExperts(count, before, after)
