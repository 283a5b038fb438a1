"""Frozen LoRA bases in FP8: which layers can have one, and how it is put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.fp8 import MULTIPLE
from fastpack_trl.lora.base_weight import Fp8Weight, loaded_weight
from fastpack_trl.model.facts import text_model


def put_in_fp8(layer: Any, dtype: torch.dtype) -> None:
    """Multiply by a frozen weight in FP8 (of 4 bits: by way of `dtype`); `_fastpack_drop_copy` reverts that."""
    base = layer.base_layer
    weight = loaded_weight(base).dense(dtype if type(base).__name__ == "Linear4bit" else base.weight.dtype)
    layer._fastpack_keep_copy(Fp8Weight.of(weight))


def reasons_against(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return why layers cannot multiply in FP8, by name; supported layers are omitted."""
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    base = text_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    reasons = {name: first_reason(_reasons(layer, head, uses)) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reasons(layer: Any, head: Any, uses: Mapping[int, int]) -> Iterator[object]:
    base = layer.base_layer
    weight = base._parameters.get("weight")
    yield layer is head and "the head"
    yield type(base).__name__ == "Linear8bitLt" and "8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits"
    yield layer.fastpack_multiplies_in_fp8 and "a weight that another run holds in FP8: end that run first"
    yield layer.merged and "merged adapters: call model.unmerge_adapter() first"
    yield (weight is None or weight.requires_grad) and "a base that is not a frozen parameter"
    yield uses[id(weight)] > 1 and "a weight that other modules share"
    yield layer.fastpack_active_adapter() is None and "no or several active adapters"
    unaligned = layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    yield unaligned and f"dimensions that are not multiples of {MULTIPLE}"
