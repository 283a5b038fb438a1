"""Floating-point operations of a training step, counted from the shapes of the modules.

A product of (m, k) by (k, n) is 2 m k n operations, as in `torch.utils.flop_counter`. Element-wise work is not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastpack_trl.model.facts import (
    SCANS,
    attention_modules,
    inside_peft,
    layer_value,
    layer_values,
    mixers,
    scan_of,
    text_model,
    window_of,
)
from fastpack_trl.model.upstream import Conv1D, GradientCheckpointingLayer
from fastpack_trl.packing.chunks import CHUNK

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
# Products whose input is made by other products of the same block; the others read the input of the block.
_SECOND = frozenset(
    {
        "o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2", "w2", "wo", "output_linear",
        "q_b_proj", "kv_b_proj",
    }
)  # fmt: skip
_LAST_NORMS = ("post_feedforward", "post_mlp", "post_ffw")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of some batches, by what asks for them."""

    forward: float
    backward: float
    recompute: float
    """Of the checkpointed layers, run a second time in the backward pass."""
    head_recompute: float
    """Of the chunked loss, which makes the logits a second time in the backward pass."""

    @property
    def model(self) -> float:
        """Return the operations that the step needs: the numerator of MFU (PaLM, arXiv:2204.02311, appendix B)."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """Return `model` and everything that is computed again: the numerator of HFU."""
        return self.model + self.recompute + self.head_recompute


@dataclass(slots=True)
class _Cost:
    """Operations per token, per position of the head, or per query-key pair."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0


@dataclass(slots=True)
class ModelFlops:
    """Operations of one model's training step per token, per query-key pair and per scored position.

    Counted exactly: every ``Linear`` (bitsandbytes' 4-bit ones by their features; PEFT's LoRA pair, only the active
    adapters; of `modules_to_save` the copy in use), GPT-2's ``Conv1D``, routers, experts (tokens x top-k), attention
    (both products, query heads, so that grouped keys count as torch counts them), convolution and scan of the recurrent
    layers that pack (`model/facts.py`), and the head. Embeddings are look-ups and count nothing. In the backward pass
    a weight's gradient counts where the weight is trainable, an input's where something before it is, or where
    ``enable_input_require_grads`` says so.

    The head of TRL's chunked loss is three products where it is trained: logits, gradient of the hidden states,
    gradient of the weight; the logits are made again in the backward pass (`StepFlops.head_recompute`), unless
    `sync_free` runs the head.

    Not exact:

    - Attention outside of transformers' interface, other convolutions and state-space mixers: only their ``Linear``
      layers are counted; `inexact` names them.
    - LoRA on expert parameters: the low-rank products, not the dense ``W + B A`` that PEFT builds. DoRA: as LoRA.
    - Experts that compute every token (llama4): still by top-k.
    - Dropped or padded slots of an expert-parallel run, merged adapters switched on and off during the run.
    - Within the first layer that has anything to train, which inputs need a gradient is read from the usual names of
      projections and norms; elsewhere it does not depend on names.
    - Recompute: a whole checkpointed layer but its last product, where torch stops early (`use_reentrant=False`).
      Layers that checkpoint in another way than by transformers' `gradient_checkpointing` count no recompute.
    - Attention kernels and scans: their own recompute (flash: half a forward, scans: a whole) counts in neither figure.
    """

    tokens: _Cost = field(default_factory=_Cost)
    pairs: dict[int | None, _Cost] = field(default_factory=lambda: defaultdict(_Cost))
    """By sliding window, in tokens; None is full attention."""
    head: _Cost = field(default_factory=_Cost)
    inexact: tuple[str, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.pairs)

    def count(
        self, tokens: float, pairs: Mapping[int | None, float], positions: float, *, twice: float | None = None
    ) -> StepFlops:
        """Return the operations of forward and backward over these sums.

        Args:
            tokens: positions that pass the layers.
            pairs: query-key pairs per head for each of `windows`; see `attention_pairs`.
            positions: positions whose logits are made.
            twice: of these, positions whose logits are made twice, as in TRL's chunked loss; default: all.
        """
        parts = [(self.tokens, tokens), (self.head, positions)]
        parts += [(cost, pairs[window]) for window, cost in self.pairs.items()]
        return StepFlops(
            forward=sum(cost.forward * amount for cost, amount in parts),
            backward=sum(cost.backward * amount for cost, amount in parts),
            recompute=sum(cost.recompute * amount for cost, amount in parts),
            head_recompute=self.head.forward * (positions if twice is None else twice) if self.head.backward else 0.0,
        )


def attention_pairs(seq_lengths: Sequence[int], window: int | None = None, *, causal_half: bool = True) -> float:
    """Return the query-key pairs per head of some documents.

    Args:
        seq_lengths: tokens of each document.
        window: keys that a query sees, itself included; None for all before it.
        causal_half: half of each squared length, the convention of the flash-attention papers; with a window W of
            fewer tokens than the document ``L W - W^2 / 2``. Without it the full square, as torch's own counter
            counts causal attention (``L min(L, W)``).
    """
    kept = [(length, min(length, window or length)) for length in seq_lengths]
    if not causal_half:
        return float(sum(length * keys for length, keys in kept))
    return sum(length * keys - keys * keys / 2 for length, keys in kept)


def model_flops(model: nn.Module) -> ModelFlops:
    """Read the shapes of a transformers model (plain or PEFT) as it stands: call it when training starts.

    Raises:
        ValueError: not a transformers model.
    """
    base = text_model(model)
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"{type(base).__name__} is no transformers model: its layers cannot be read")
    return _Reader(base).read()


class _Reader:
    """Walks the modules in the order in which they run; `flow` is whether their input needs a gradient."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.config = base.config.get_text_config()
        self.attentions = {id(module) for module in attention_modules(base)}
        self.mixers = mixers(base)
        self.head = base.get_output_embeddings()
        self.out = ModelFlops()
        self.inexact: dict[str, None] = {}
        self.share = 1.0
        self.checkpointed = False
        self.last: tuple[float, bool] = (0.0, False)
        """Operations of the product that ran last, and whether an early stop of the recompute leaves it out."""

    def read(self) -> ModelFlops:
        embedding = self.base.get_input_embeddings()
        flow = _trains(embedding) or any(
            getattr(module, "_require_grads_hooks", None) for module in self.base.modules()
        )
        flow = self.visit("", self.base, flow)
        if self.head is not None:
            self.product_of(_in_use(self.head), flow, self.out.head)
        if not self.out.pairs:
            self.inexact[f"attention of {self.config.model_type}: not reached by transformers' interface"] = None
        self.out.inexact = tuple(self.inexact)
        self.out.pairs = dict(self.out.pairs)
        return self.out

    def visit(self, name: str, module: Any, flow: bool) -> bool:
        """Add what `module` computes; returns whether its output needs a gradient."""
        if module is self.head or isinstance(module, nn.Embedding):
            return flow or _trains(module)
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            return self.visit(name, _in_use(module), flow)
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            return self.lora(name, module, flow)
        if isinstance(module, nn.Linear | Conv1D):
            self.product_of(module, flow, self.out.tokens)
        elif experts := [(key, p) for key, p in module.named_parameters(recurse=False) if len(_shape(p)) == 3]:
            self.experts(name, experts, flow)
        elif _is_router(module):
            rows, columns = _shape(module.weight)
            self.product(rows * columns, module.weight.requires_grad, flow, self.out.tokens)
        elif isinstance(module, nn.Conv1d):
            self.inexact["convolutions and the state-space mixers that use them"] = None
        elif id(module) in self.attentions:
            self.attention(module, flow)
            self.block(module, flow)
        elif module in self.mixers:
            self.mixer(module, flow)
        else:
            self.block(module, flow)
        return flow or _trains(module)

    def block(self, module: Any, flow: bool) -> None:
        children = list(module.named_children())
        if isinstance(module, nn.ModuleList):
            self.stack(children, flow)
        elif isinstance(module, GradientCheckpointingLayer):
            self.layer(module, children, flow)
        elif any(_is_product(child) for _, child in children):
            # Parallel readers of the block's input, and what reads their output.
            for name, child in children:
                before = (other for _, other in children if name in _SECOND and other is not child)
                self.visit(name, child, flow or any(_trains(other) for other in before))
        else:
            for name, child in children:
                flow = self.visit(name, child, flow)

    def layer(self, module: Any, children: list[tuple[str, Any]], flow: bool) -> None:
        """Add one decoder layer; checkpointed as a whole or not at all."""
        outer = self.checkpointed
        self.checkpointed = outer or bool(module.gradient_checkpointing)
        for name, child in sorted(children, key=_running_order):
            flow = self.visit(name, child, flow)
        last, stops_early = self.last
        if self.checkpointed and stops_early and not any(norm in name for name, _ in children for norm in _LAST_NORMS):
            self.out.tokens.recompute -= last
        self.checkpointed = outer

    def stack(self, children: list[tuple[str, Any]], flow: bool) -> None:
        linear_experts = len(children) > 1 and type(children[0][1]).__name__.lower().endswith(("expert", "mlp"))
        for name, child in children:
            if linear_experts and (top_k := self.top_k()):
                self.share = top_k / len(children)
                self.visit(name, child, flow)
                self.share = 1.0
            else:
                flow = self.visit(name, child, flow)

    def product(self, size: float, trained: bool, flow: bool, cost: _Cost, *, stops_early: bool = False) -> None:
        """Add one weight of `size` elements: output, gradient of the input, gradient of the weight."""
        forward = 2.0 * size * self.share
        cost.forward += forward
        cost.backward += forward * (flow + trained)
        if self.checkpointed:
            cost.recompute += forward
        self.last = forward, stops_early

    def product_of(self, module: Any, flow: bool, cost: _Cost) -> None:
        # A packed 4-bit weight has another shape than the product.
        sides = _shape(module.weight) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        # torch's own function saves its operands before it computes: an early stop comes before the product.
        plain = type(module) is nn.Linear
        self.product(math.prod(sides), module.weight.requires_grad, flow, cost, stops_early=plain)

    def lora(self, name: str, module: Any, flow: bool) -> bool:
        out = self.visit(name, module.base_layer, flow)
        if module.disable_adapters or module.merged:
            return out
        for adapter in module.active_adapters:
            if adapter not in module.lora_A:
                continue
            first, second = module.lora_A[adapter], module.lora_B[adapter]
            share = 1.0
            if hasattr(module, "parameter_name"):
                expert_count = _shape(module.get_param())[0] if len(_shape(module.get_param())) == 3 else 1
                # The experts' pairs lie stacked; a token meets top-k of them.
                share = (self.top_k() or expert_count) / expert_count if expert_count > 1 else 1.0
                self.inexact["LoRA on expert parameters: low-rank products, not the dense sum that PEFT builds"] = None
            outer, self.share = self.share, self.share * share
            self.product_of(first, flow, self.out.tokens)
            self.product_of(second, flow or first.weight.requires_grad, self.out.tokens)
            self.share = outer
        return out or _trains(module)

    def experts(self, name: str, weights: list[tuple[str, Any]], flow: bool) -> None:
        top_k = self.top_k()
        if not top_k:
            self.inexact["experts: the config names no top-k"] = None
            return
        for key, weight in weights:
            second = key.removesuffix("_proj") in ("down", "w2") or name in _SECOND
            before = any(other.requires_grad for label, other in weights if label != key)
            size = math.prod(_shape(weight)[1:]) * top_k
            self.product(size, weight.requires_grad, flow or (second and before), self.out.tokens)

    def top_k(self) -> int:
        return next((int(value) for name in _TOP_K for value in layer_values(self.config, name) if value), 0)

    def attention(self, module: Any, flow: bool) -> None:
        heads = int(layer_value(module, "num_attention_heads"))
        own = getattr(module, "head_dim", None) or layer_value(module, "head_dim")
        plain = int(own or self.config.hidden_size // heads)
        value = int(getattr(module, "v_head_dim", None) or plain)
        key = int(getattr(module, "qk_head_dim", None) or plain)
        query_grad, key_grad, value_grad = (self.operand(module, letter, flow) for letter in "qkv")
        cost: _Cost = self.out.pairs[window_of(module)]
        forward = 2.0 * heads * (key + value)
        cost.forward += forward
        # dQ and dK at the width of a key; dP and dV at that of a value.
        cost.backward += 2.0 * heads * (key * (query_grad + key_grad) + value * ((query_grad or key_grad) + value_grad))
        cost.recompute += forward if self.checkpointed else 0.0

    def mixer(self, module: Any, flow: bool) -> None:
        """Add a recurrent layer: its projections, and the convolution and the scan between them."""
        children = list(module.named_children())
        moves = flow or any(_trains(child) for name, child in children if name not in _SECOND)
        for name, child in children:
            if isinstance(child, nn.Conv1d):
                self.product(math.prod(_shape(child.weight)), child.weight.requires_grad, moves, self.out.tokens)
            else:
                self.visit(name, child, moves if name in _SECOND else flow)
        if scan := scan_of(module, self.mixers[module]):
            forward = float(scan.flops(CHUNK))
            cost: _Cost = self.out.tokens
            cost.forward += forward
            cost.backward += 2 * forward * moves
            cost.recompute += forward * self.checkpointed
        elif self.mixers[module].kind in SCANS.values():
            self.inexact[f"the scan of {type(module).__name__}: its sizes are not known"] = None

    @staticmethod
    def operand(module: Any, letter: str, flow: bool) -> bool:
        children = dict(module.named_children())
        parts = [child for name, child in children.items() if name in (f"{letter}_proj", f"{letter}_norm")]
        if not any(map(_is_product, parts)):  # all before the output
            parts = [c for name, c in children.items() if name not in _SECOND or name in ("q_b_proj", "kv_b_proj")]
        return flow or any(map(_trains, parts))


def _running_order(child: tuple[str, Any]) -> int:
    """Return the children in running order: decoder layers register their norms last and run them first."""
    name, module = child
    norm = "norm" in type(module).__name__.lower()
    if norm and (name.startswith(("input", "pre_att", "ln_1", "self_attn")) or "pre_self" in name):
        return 0
    attention = "attn" in name or "attention" in name
    if attention and not norm:
        return 1
    return 2 if norm and not any(part in name for part in _LAST_NORMS) else 3


def _in_use(module: Any) -> Any:
    """Return the copy of a `modules_to_save` wrapper that runs; other modules as they are."""
    if not (hasattr(module, "modules_to_save") and hasattr(module, "original_module")):
        return module if hasattr(module, "lora_A") else inside_peft(module)
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    return module.modules_to_save[active[0]] if active and not module.disable_adapters else module.original_module


def _is_product(module: Any) -> bool:
    if hasattr(module, "lora_A") or _is_router(module) or isinstance(module, nn.Linear | Conv1D):
        return True
    if hasattr(module, "original_module"):
        return _is_product(module.original_module)
    return any(len(_shape(parameter)) == 3 for parameter in module.parameters(recurse=False))


def _is_router(module: Any) -> bool:
    """Return whether a bare parameter is a router's matrix: ``(num_experts, hidden_size)``."""
    weight = getattr(module, "weight", None)
    named = any(part in type(module).__name__.lower() for part in ("router", "gate"))
    return named and isinstance(weight, nn.Parameter) and len(_shape(weight)) == 2


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed ZeRO-3 leaves an empty tensor behind


def _trains(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
