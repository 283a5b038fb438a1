"""The load-balancing loss of all layers at once (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

Stock goes layer by layer and keeps the softmax of each for backward. Here the layers are stacked, nothing but the
router logits is kept, and the gradient is a formula: the loss is linear in the mean routing probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 25
"""Logits that are stacked at once: 128 MiB in fp32, whatever the depth of the model."""


def load_balancing_loss(
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    *,
    rows: int = 0,
) -> Tensor | int:
    """Return the auxiliary loss; signature of transformers' `load_balancing_loss_func`, differentiable in the logits.

    Args:
        gate_logits: a tuple of (N, E) router logits, one per layer with experts; anything else gives 0, as in stock.
        num_experts: E.
        top_k: experts per token.
        attention_mask: (batch, length) with N elements; 0 leaves a token out.
        rows: only the first so many tokens count; all where 0.
    """
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    mask = None if attention_mask is None else attention_mask.reshape(-1).float()
    loss: Tensor = _BalancingLoss.apply(num_experts or gate_logits[0].shape[-1], top_k, mask, rows, *gate_logits)
    return loss


def load_balancing_losses(router_logits: object, top_k: int, parts: Sequence[int] | Tensor) -> Tensor | int:
    """Return the `load_balancing_loss` of each micro-batch in a merged row: (num_parts,) fp32.

    It is a product of two means over tokens, so that the loss of the row is not the mean of its parts'.

    Args:
        router_logits: a tuple with (tokens, num_experts) per layer; anything else gives 0, as in transformers.
        top_k: experts per token.
        parts: tokens of each part, on the host, which add up to the row; or `PackedBatch.part_bounds`, after whose last
            entry tokens count in no part.
    """
    if not isinstance(router_logits, tuple) or not router_logits:
        return 0
    (num_tokens, num_experts), device = router_logits[0].shape, router_logits[0].device
    # Each part counts in bins of its own: as many kernels as for one.
    if isinstance(parts, Tensor):
        ends, count = parts[1:].to(device), len(parts) - 1
        part = torch.bucketize(torch.arange(num_tokens, device=device, dtype=ends.dtype), ends, right=True)
        tokens = (parts.to(device).diff().clamp(min=1) * len(router_logits)).float()[:, None]
    else:
        count = len(parts)
        part = torch.cat([torch.full((tokens,), place, device=device) for place, tokens in enumerate(parts)])
        tokens = torch.cat([torch.full((1, 1), float(tokens * len(router_logits)), device=device) for tokens in parts])
    # The last bin is that of tokens in no part.
    chosen = torch.zeros((count + 1) * num_experts, dtype=torch.float32, device=device)
    probability = torch.zeros(count + 1, num_experts, dtype=torch.float32, device=device)
    for logits in router_logits:
        probabilities = torch.nn.functional.softmax(logits.to(device), dim=-1)
        experts = torch.topk(probabilities, top_k, dim=-1).indices + part[:, None] * num_experts
        chosen = chosen.index_add(0, experts.reshape(-1), torch.ones(experts.numel(), device=device))
        probability = probability.index_add(0, part, probabilities.float())
    share = chosen.view(count + 1, num_experts)[:count] / tokens
    return (share * (probability[:count] / tokens)).sum(dim=1) * num_experts


class _BalancingLoss(torch.autograd.Function):
    """``E * sum_e f_e p_e``: f the share of routed slots, p the mean probability of each expert, over all layers."""

    @staticmethod
    def forward(ctx: Any, num_experts: int, top_k: int, mask: Tensor | None, rows: int, *logits: Tensor) -> Tensor:
        device = logits[0].device
        counts = torch.zeros(num_experts, dtype=torch.float32, device=device)
        probabilities = torch.zeros_like(counts)
        mask = None if mask is None else mask.to(device)
        for stacked in _chunks(logits, rows, device):
            routing = torch.softmax(stacked, dim=-1)
            chosen = torch.topk(routing, top_k, dim=-1).indices
            # Sums of ones are exact in fp32 in any order, and ask the device nothing.
            if mask is None:
                counts.scatter_add_(0, chosen.reshape(-1), counts.new_ones(chosen.numel()))
                probabilities += routing.sum((0, 1), dtype=torch.float32)
            else:
                weight = mask[: stacked.shape[1]]
                slots = weight[:, None].expand(chosen.shape[1:]).expand(chosen.shape)
                counts.scatter_add_(0, chosen.reshape(-1), slots.reshape(-1))
                probabilities += (routing * weight[:, None]).sum((0, 1))  # no product: that may be TF32
        tokens = _rows(logits[0], rows) if mask is None else mask[: _rows(logits[0], rows)].sum()
        total = tokens * len(logits)
        share = counts / total
        ctx.save_for_backward(share * (num_experts / total), *([] if mask is None else [mask]), *logits)
        ctx.masked, ctx.rows = mask is not None, rows
        return (share * (probabilities / total)).sum() * num_experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        slope, *rest = ctx.saved_tensors
        mask, logits = (rest[0], rest[1:]) if ctx.masked else (None, rest)
        slope = slope * grad
        grads: list[Tensor] = []
        for layer in logits:
            rows = _rows(layer, ctx.rows)
            routing = torch.softmax(layer[:rows].float(), dim=-1)
            local = slope.to(layer.device)
            inner = routing * (local - (routing @ local)[:, None])
            if mask is not None:
                inner *= mask[:rows, None].to(layer.device)
            full = inner if rows == len(layer) else nn.functional.pad(inner, (0, 0, 0, len(layer) - rows))
            grads.append(full.to(layer.dtype))
        return None, None, None, None, *grads


def _rows(layer: Tensor, rows: int) -> int:
    return min(rows, len(layer)) if rows else len(layer)


def _chunks(logits: tuple[Tensor, ...], rows: int, device: torch.device) -> Iterator[Tensor]:
    """Yield (layers, rows, E) pieces of at most `_CHUNK` elements, or one layer."""
    step = max(1, _CHUNK // max(1, logits[0].numel()))
    for start in range(0, len(logits), step):
        yield torch.stack([layer[: _rows(layer, rows)].to(device) for layer in logits[start : start + step]])


def replaced_by() -> str:
    """Return the module of a foreign function where TRL finds the loss of every family; empty if there is none."""
    home = sys.modules.get("transformers.models.mixtral.modeling_mixtral")  # TRL imports it when it is needed
    found = getattr(home, "load_balancing_loss_func", None)
    module = str(getattr(found, "__module__", ""))
    return "" if module.startswith("transformers.") else module


def experts_named(config: Any) -> Any:
    """Return `config` with its number of experts as `num_experts`, the one name that trl's forward knows.

    deepseek_v3, glm4_moe and granitemoe spell it otherwise, and that forward raises. The config itself and its class
    are left alone: other models are of the same class, and a file is written from it.
    """
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts")
    own = next((name for name in names if name in vars(config)), None)
    return config if own is None or hasattr(config, "num_experts") else _ExpertsNamed(config, own)


class _ExpertsNamed:
    def __init__(self, config: Any, own: str) -> None:
        self._config, self._own = config, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, self._own if name == "num_experts" else name)
