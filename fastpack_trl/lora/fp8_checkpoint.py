"""LoRA over the linear layers of transformers' FP8 checkpoints: which can be multiplied with the values that they have.

Layers are `FP8Linear` of ``transformers.integrations.finegrained_fp8``, their weight ``weight * weight_scale_inv``.
"""

from __future__ import annotations

from typing import Any

import torch

from fastpack_trl.kernels.fp8 import BLOCK, BLOCK_MULTIPLE, FP8
from fastpack_trl.lora.base_weight import Fp8Weight

_READ = ("block_size", "activation_scheme", "weight_scale_inv")
_CAPABILITY = 9
_CUDA = (12, 9)


def is_fp8_linear(base: Any) -> bool:
    """Return whether a base layer is transformers' `FP8Linear`: by name, so that its module is not imported."""
    return type(base).__name__ == "FP8Linear"


def reason_against_layout(base: Any) -> str:
    """Return why the values of an `FP8Linear` cannot be multiplied as they are, with the remedy; empty if they can."""
    why = _reason(base)
    return why and f"{why}: load it with FineGrainedFP8Config(dequantize=True)"


def _reason(base: Any) -> str:
    missing = [name for name in _READ if not hasattr(base, name)]
    if missing:
        return f"an FP8 base without {', '.join(missing)}"
    if base.weight.dtype != FP8:
        return f"an FP8 base with weights in {base.weight.dtype}"
    if base.block_size is None or tuple(base.block_size) != (BLOCK, BLOCK):
        return f"an FP8 base whose scales are not of blocks of {BLOCK} x {BLOCK}"
    if base.activation_scheme != "dynamic":
        return "an FP8 base with fixed scales of activations"
    if any(size % BLOCK_MULTIPLE for size in base.weight.shape):
        return f"an FP8 base with dimensions that are no multiples of {BLOCK_MULTIPLE}"
    if base.weight.is_cuda and not _multiplies_blocks(base.weight.device):
        return "an FP8 base on a device or CUDA that multiplies no blocks (compute capability 9 and CUDA 12.9 do)"
    return ""


def _multiplies_blocks(device: torch.device) -> bool:
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == _CAPABILITY and cuda >= _CUDA


def weight_of(base: Any, *, both_layouts: bool) -> Fp8Weight:
    """Return the weight of an `FP8Linear` whose layout has no reason against it; the values are its parameter's."""
    return Fp8Weight.of_blocks(base.weight.detach(), base.weight_scale_inv.detach(), both_layouts=both_layouts)
