"""The load-balancing loss of all layers at once (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

transformers goes layer by layer and keeps the softmax of each for backward. Here the layers are stacked, nothing but
the router logits is kept, and the gradient is a formula: the loss is linear in the mean routing probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.model.changes import patch_attribute

_CHUNK = 1 << 25
"""Logits that are stacked at once: 128 MiB in fp32, whatever the depth of the model."""


def load_balancing_losses(
    router_logits: object, top_k: int, parts: Sequence[int], copies: Tensor | None = None
) -> Tensor | None:
    """Return the load-balancing loss of each micro-batch in a row: (num_parts,) fp32, differentiable in the logits.

    It is a product of two means over tokens, so that the loss of the row is not the mean of its parts'. Never
    synchronises.

    Args:
        router_logits: a tuple with (tokens, num_experts) per layer; anything else gives None (a loss of 0).
        top_k: experts per token.
        parts: tokens of each part, on the host. Tokens after the last part count in none.
        copies: (tokens,) fp32, how many documents have each token; None: one.
    """
    if not isinstance(router_logits, tuple) or not router_logits:
        return None
    first: Tensor = router_logits[0]
    num_tokens, device = len(first), first.device
    # Each part counts in bins of its own, as many kernels as for one; tokens in no part have the last bin.
    sizes = torch.cat([torch.full((1,), float(tokens), dtype=torch.float32, device=device) for tokens in parts])
    counts = [*parts, num_tokens - sum(parts)]
    part = torch.cat([torch.full((tokens,), place, device=device) for place, tokens in enumerate(counts)])
    if copies is not None:
        copies = copies[:num_tokens].to(device)
        sizes = sizes.new_zeros(len(sizes) + 1).index_add_(0, part, copies)[:-1].clamp(min=1)
    losses: Tensor = _BalancingLoss.apply(top_k, part, sizes * len(router_logits), copies, *router_logits)
    return losses


class _BalancingLoss(torch.autograd.Function):
    """``E * sum_e f_e p_e``: f the share of routed slots, p the mean probability of each expert, over all layers."""

    @staticmethod
    def forward(ctx: Any, top_k: int, part: Tensor, tokens: Tensor, copies: Tensor | None, *logits: Tensor) -> Tensor:
        num_parts, num_experts, device = len(tokens), logits[0].shape[1], logits[0].device
        counts = torch.zeros(num_parts + 1, num_experts, dtype=torch.float32, device=device)
        probabilities = torch.zeros_like(counts)
        for stacked in _chunks(logits, device):
            routing = torch.softmax(stacked, dim=-1)
            slots = torch.topk(routing, top_k, dim=-1).indices + part[:, None] * num_experts
            # Sums of ones are exact in fp32 in any order.
            each = counts.new_ones(slots.shape) if copies is None else copies[:, None].expand(slots.shape)
            counts.view(-1).scatter_add_(0, slots.reshape(-1), each.reshape(-1))
            routed = routing.sum(0, dtype=torch.float32)
            probabilities.index_add_(0, part, routed if copies is None else routed * copies[:, None])
        share = counts[:-1] / tokens[:, None]
        # What a token adds per unit of probability; in no part, nothing.
        slope = torch.nn.functional.pad(share * (num_experts / tokens[:, None]), (0, 0, 0, 1))
        ctx.save_for_backward(slope, part, copies, *logits)
        return (share * (probabilities[:-1] / tokens[:, None])).sum(1) * num_experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        slope, part, copies, *logits = ctx.saved_tensors
        slope = (slope * torch.nn.functional.pad(grad, (0, 1))[:, None])[part]
        slope = slope if copies is None else slope * copies[:, None]
        grads: list[Tensor] = []
        for layer in logits:
            routing, local = torch.softmax(layer.float(), dim=-1), slope.to(layer.device)
            grads.append((routing * (local - (routing * local).sum(-1, keepdim=True))).to(layer.dtype))
        return None, None, None, None, *grads


def _chunks(logits: tuple[Tensor, ...], device: torch.device) -> Iterator[Tensor]:
    """Yield (layers, tokens, E) pieces of at most `_CHUNK` elements, or one layer."""
    step = max(1, _CHUNK // max(1, logits[0].numel()))
    for start in range(0, len(logits), step):
        yield torch.stack([layer.to(device) for layer in logits[start : start + step]])


def replaced_by() -> str:
    """Return the module of a foreign function where TRL finds the loss of every family; empty if there is none."""
    home = sys.modules.get("transformers.models.mixtral.modeling_mixtral")  # TRL imports it when it is needed
    found = getattr(home, "load_balancing_loss_func", None)
    module = str(getattr(found, "__module__", ""))
    return "" if module.startswith("transformers.") else module


def experts_named(config: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which `config` has its number of experts as `num_experts`, the one name TRL's forward knows.

    deepseek_v3, glm4_moe and granitemoe spell it otherwise, and that forward raises. For the time of a call only: a
    file is written from the config.
    """
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts")
    own = next((name for name in names if name in vars(config)), None)
    if own is None or hasattr(config, "num_experts"):
        return nullcontext
    return partial(patch_attribute, config, "num_experts", getattr(config, own))
