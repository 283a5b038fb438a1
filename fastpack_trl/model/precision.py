"""Devices that lack a kernel: bf16 without hardware for it, the loss scaler of fp16, 4-bit weights on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from fastpack_trl.model.patches import attribute_set

_BF16_CAPABILITY = (8, 0)
_PACKS = "support_avx512bf16_for_cpu"
"""Where bitsandbytes says that an evaluation packs a layer's 4-bit weights: the product has no backward then."""


def emulates_bf16(device: torch.device) -> bool:
    """Return whether a CUDA device computes bf16 products without hardware for them (T4, V100)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < _BF16_CAPABILITY


def fit_precision(trainer: Any) -> dict[str, str]:
    """Make adapters in bf16 trainable under the loss scaler of fp16; return what is to be said of the run's precision.

    TRL casts the adapters of a 4-bit model to bf16, and torch has no kernel on CUDA that unscales gradients in bf16:
    stock ends in its first step. They become fp32, as PEFT makes them beside a 16-bit base.
    """
    model, device, args = trainer.model, torch.device(trainer.args.device), trainer.args
    facts = {}
    if args.bf16 and emulates_bf16(device):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["precision"] = f"bf16 is emulated on compute capability {capability}: fp16=True, bf16=False is faster"
    if trainer.accelerator.scaler is None or not isinstance(model, PeftModel):
        return facts
    narrow = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if narrow and not unscales_bf16(device):
        for parameter in narrow:
            parameter.data = parameter.data.float()
        facts["adapters"] = (
            f"{len(narrow)} bf16 -> fp32: torch has no kernel that unscales bf16 gradients (fp16=True), and stock ends "
            "in its first step"
        )
    return facts


@lru_cache
def unscales_bf16(device: torch.device) -> bool:
    """Return whether torch's loss scaler takes gradients in bf16 on a device."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16, device=device))
    parameter.grad = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    try:
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.0))
    except (NotImplementedError, RuntimeError):
        return False
    return True


@contextmanager
def not_packed_on_cpu(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Keep the layout of 4-bit weights while a trainer runs (bitsandbytes 0.50, `Linear4bit.forward`).

    The layout stays when training goes on, and gradients end at each such product without a word.

    Raises:
        ValueError: `training`, and weights were packed before. What unpacks them rounds their scales.
    """
    layers: list[Any] = [module for module in model.modules() if getattr(module, _PACKS, False)]
    states = [getattr(layer.weight, "quant_state", None) for layer in layers]
    packed = sum(bool(getattr(state, "packing_format_for_cpu", False)) for state in states)
    if training and packed:
        raise ValueError(
            f"an evaluation on the CPU has packed the 4-bit weights of {packed} layers for inference, where they have "
            "no backward: load the model again, and call it outside of the trainer only with inputs that need gradients"
        )
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attribute_set(layer, _PACKS, False))
        yield
