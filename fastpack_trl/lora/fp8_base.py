"""Frozen LoRA bases in FP8: which layers can have one, and how it is put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastpack_trl.kernels.fp8 import MULTIPLE
from fastpack_trl.lora.base_weight import Fp8Weight, loaded_weight
from fastpack_trl.model.facts import text_model


def put_in_fp8(layer: Any, dtype: torch.dtype) -> None:
    """Multiply by the frozen weight of a LoRA layer in FP8; `_fastpack_drop_copy` reverts that.

    Args:
        layer: one without an entry in `reasons_against`.
        dtype: to which a 4-bit weight is dequantized.
    """
    base = layer.base_layer
    weight = loaded_weight(base).dense(dtype if type(base).__name__ == "Linear4bit" else base.weight.dtype)
    layer._fastpack_keep_copy(Fp8Weight.of(weight))


def reasons_against(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return why layers cannot multiply in FP8, by name; supported layers are omitted."""
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    base = text_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    reasons = {name: _reason_against(layer, head, uses) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason_against(layer: Any, head: Any, uses: Mapping[int, int]) -> str:
    weight = layer.base_layer._parameters.get("weight")
    if layer is head:
        return "the head"
    if type(layer.base_layer).__name__ == "Linear8bitLt":
        return "8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits"
    if layer.fastpack_multiplies_in_fp8:
        return "a weight that another run holds in FP8: end that run first"
    if layer.merged:
        return "merged adapters: call model.unmerge_adapter() first"
    if weight is None or weight.requires_grad:
        return "a base that is not a frozen parameter"
    if uses[id(weight)] > 1:
        return "a weight that other modules share"
    if layer.fastpack_active_adapter() is None:
        return "no or several active adapters"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"dimensions that are not multiples of {MULTIPLE}"
    return ""
