"""Floating-point operations of training, counted from the shapes of the modules: the numerator of MFU.

A matmul of (m, k) by (k, n) is 2 m k n operations, as in `torch.utils.flop_counter`. Element-wise work is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastpack_trl.model import facts
from fastpack_trl.packing.chunks import CHUNK

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of one model: per weight and token 2 forward, 2 for gradients of inputs, 2 for those of the weight.

    Experts count by top-k; of LoRA on expert stacks, the low-rank matmuls count. As in MFU, padding, recomputation, and
    matmuls whose inputs need no gradient (some in the first layer) are not counted.

    Attributes:
        forward: per token, of all matmuls and scans.
        trained: per token, of gradients of weights.
        pairs: forward per query-key pair (`attention_pairs`) of all layers, by their sliding window; None is full
            attention.
    """

    forward: float
    trained: float
    pairs: dict[int | None, float]

    def count(self, tokens: float, pairs: Mapping[int | None, float]) -> float:
        """Return the operations of forward and backward for these tokens and pairs (PaLM, arXiv:2204.02311, B)."""
        attention = sum(3 * flops * pairs.get(window, 0.0) for window, flops in self.pairs.items())
        return tokens * (2 * self.forward + self.trained) + attention


def attention_pairs(seq_lengths: Sequence[int], window: int | None = None) -> float:
    """Return the query-key pairs per head of some documents: half of each squared length, as flash-attention counts.

    With a window W of fewer tokens than the document ``L W - W^2 / 2``.
    """
    kept = [(length, min(length, window or length)) for length in seq_lengths]
    return sum(length * keys - keys * keys / 2 for length, keys in kept)


def model_flops(model: nn.Module) -> ModelFlops:
    """Read the shapes of a transformers model (plain or PEFT); raise `ValueError` for another module."""
    base: Any = facts.text_model(model)
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"{type(base).__name__} is not a transformers model: its layers cannot be read")
    config = base.config.get_text_config()
    top_k, experts = (
        next((int(value) for name in names for value in facts.layer_values(config, name) if value), 0)
        for names in (_TOP_K, _EXPERTS)
    )
    recurrent = facts.mixers(base)
    convolutions = {id(child) for mixer in recurrent for child in mixer.modules() if isinstance(child, nn.Conv1d)}
    saved = [module.original_module for module in base.modules() if getattr(module, "modules_to_save", None)]
    idle = {id(inner) for original in saved for inner in original.modules()}  # PEFT's copies run instead
    forward = trained = 0.0
    for name, module in base.named_modules():
        is_other_convolution = isinstance(module, nn.Conv1d) and id(module) not in convolutions
        if isinstance(module, nn.Embedding) or is_other_convolution or id(module) in idle:
            continue
        share = top_k / experts if "experts" in name.split(".") and top_k and experts else 1.0
        for size, trains in _products(module):
            forward += 2 * size * share
            trained += 2 * size * share * trains
    for mixer, kind in recurrent.items():
        if scan := facts.scan_of(mixer, kind):
            forward += float(scan.flops(CHUNK))
            trained += float(scan.flops(CHUNK))  # its backward is twice its forward
    pairs: dict[int | None, float] = {}
    for module in facts.attention_modules(base):
        window = facts.window_of(module)
        pairs[window] = pairs.get(window, 0.0) + _attention(module, config)
    return ModelFlops(forward, trained, pairs)


def _products(module: Any) -> list[tuple[float, bool]]:
    """Return sizes and trainability of a module's own weights that it multiplies by."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is not None and hasattr(module, "in_features"):  # a packed 4-bit weight has another shape
        return [(module.in_features * module.out_features, weight.requires_grad)]
    if weight is not None and (len(_shape(weight)) == 2 or isinstance(module, nn.Conv1d)):
        return [(math.prod(_shape(weight)), weight.requires_grad)]
    stacks = [parameter for parameter in own.values() if len(_shape(parameter)) == 3]  # of experts
    return [(math.prod(_shape(stack)), stack.requires_grad) for stack in stacks]


def _attention(module: Any, config: Any) -> float:
    heads = int(facts.layer_value(module, "num_attention_heads"))
    own = getattr(module, "head_dim", None) or facts.layer_value(module, "head_dim")
    plain = int(own or config.hidden_size // heads)
    value = int(getattr(module, "v_head_dim", None) or plain)
    key = int(getattr(module, "qk_head_dim", None) or plain)
    return 2.0 * heads * (key + value)


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed ZeRO-3 leaves an empty tensor behind
