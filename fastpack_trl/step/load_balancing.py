"""The load-balancing loss of all layers at once (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

transformers goes layer by layer and keeps the softmax of each for backward. Here layers are stacked and recomputed in
backward, so that nothing but the router logits is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack_trl.model.changes import patch_attribute

_CHUNK = 1 << 25
"""Logits that are stacked at once: 128 MiB in fp32, whatever the depth of the model."""


def load_balancing_losses(
    router_logits: object, top_k: int, parts: Sequence[int], copies: Tensor | None = None
) -> Tensor | None:
    """Return the load-balancing loss of each micro-batch in a row: (num_parts,) fp32, differentiable in the logits.

    ``E * sum_e f_e p_e``: f the share of routed slots, p the mean probability of each expert, over all layers. It
    is a product of two means over tokens: the loss of a row is not the mean of its parts'. Never synchronizes.

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
    bins = counted = probabilities = torch.zeros(len(counts), first.shape[1], dtype=torch.float32, device=device)
    per_run = max(1, _CHUNK // max(1, first.numel()))
    for start in range(0, len(router_logits), per_run):
        given = (top_k, part, copies, bins, *router_logits[start : start + per_run])
        slots, mass = checkpoint(_sums, *given, use_reentrant=False, preserve_rng_state=False)
        counted, probabilities = counted + slots, probabilities + mass
    sizes = sizes[:, None] * len(router_logits)
    return (counted[:-1] / sizes * (probabilities[:-1] / sizes)).sum(1) * first.shape[1]


def _sums(top_k: int, part: Tensor, copies: Tensor | None, bins: Tensor, *logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return routed slots and summed probabilities of each expert in each part, over some layers."""
    routing = torch.softmax(torch.stack([layer.to(bins.device) for layer in logits]), dim=-1)
    chosen = torch.topk(routing.detach(), top_k, dim=-1).indices + part[:, None] * bins.shape[1]
    # Sums of ones are exact in fp32 in any order.
    each = bins.new_ones(chosen.shape) if copies is None else copies[:, None].expand(chosen.shape)
    slots = bins.view(-1).scatter_add(0, chosen.reshape(-1), each.reshape(-1)).view_as(bins)
    routed = routing.sum(0, dtype=torch.float32)
    return slots, bins.index_add(0, part, routed if copies is None else routed * copies[:, None])


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
