"""Devices without a kernel: bf16 without hardware for it, the loss scaler of fp16, 4-bit weights on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel

from fastpack_trl.model.changes import patch_attribute

_PACKS = "support_avx512bf16_for_cpu"
"""Set by bitsandbytes on layers whose 4-bit weights an evaluation packs: the matmul then has no backward."""


def emulates_bf16(device: torch.device) -> bool:
    """Return whether a CUDA device lacks hardware for bf16 matmuls (T4, V100)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def fit_precision(trainer: Any) -> dict[str, str]:
    """Make bf16 adapters trainable under the loss scaler of fp16; return facts of the run's precision for the report.

    TRL casts the adapters of a 4-bit model to bf16, and torch has no CUDA kernel that unscales bf16 gradients, so that
    TRL ends in its first step. They become fp32, as PEFT makes them on a 16-bit base.
    """
    model, device, facts = trainer.model, torch.device(trainer.args.device), {}
    if trainer.args.bf16 and emulates_bf16(device):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["precision"] = f"bf16 is emulated on compute capability {capability}: fp16=True, bf16=False is faster"
    has_scaler = trainer.accelerator.scaler is not None and isinstance(model, PeftModel)
    narrow = [p for p in model.parameters() if has_scaler and p.requires_grad and p.dtype == torch.bfloat16]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    if narrow:
        why = "torch has no kernel that unscales bf16 gradients (fp16=True), and TRL ends in its first step"
        facts["adapters"] = f"{len(narrow)} bf16 -> fp32: {why}"
    return facts


@contextmanager
def four_bit_layout(run: Any) -> Iterator[None]:
    """Keep bitsandbytes from repacking 4-bit weights while a trainer runs (0.50, `Linear4bit.forward`).

    The packed layout persists, and gradients silently end at each such matmul when training resumes. If the `Run` is a
    training, raise `ValueError` if weights were packed before: unpacking rounds their scales.
    """
    layers: list[Any] = [module for module in run.model.modules() if getattr(module, _PACKS, False)]
    states = [getattr(layer.weight, "quant_state", None) for layer in layers]
    if packed := run.training and sum(bool(getattr(state, "packing_format_for_cpu", False)) for state in states):
        raise ValueError(
            f"an evaluation on the CPU has packed the 4-bit weights of {packed} layers for inference, where they have "
            "no backward: load the model again, and call it outside of the trainer only with inputs that need gradients"
        )
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch_attribute(layer, _PACKS, False))
        yield
