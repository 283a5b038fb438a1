"""The load-balancing loss of experts for each micro-batch inside of a merged row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_losses(router_logits: object, top_k: int, parts: Sequence[int]) -> Tensor | int:
    """`fastpack_trl.step.load_balancing.load_balancing_loss` of each part of a row: (num_parts,) fp32.

    It is a product of two means over tokens, so that the loss of the row is not the mean of its parts'.

    Args:
        router_logits: a tuple with (tokens, num_experts) per layer; anything else gives 0, as in transformers.
        top_k: experts per token.
        parts: tokens of each part, on the host; they add up to the row.
    """
    if not isinstance(router_logits, tuple) or not router_logits:
        return 0
    device, num_experts, count = router_logits[0].device, router_logits[0].shape[-1], len(parts)
    # Each part counts in bins of its own: as many kernels as for one.
    part = torch.cat([torch.full((tokens,), place, device=device) for place, tokens in enumerate(parts)])
    chosen = torch.zeros(count * num_experts, dtype=torch.float32, device=device)
    probability = torch.zeros(count, num_experts, dtype=torch.float32, device=device)
    for logits in router_logits:
        probabilities = torch.nn.functional.softmax(logits.to(device), dim=-1)
        experts = torch.topk(probabilities, top_k, dim=-1).indices + part[:, None] * num_experts
        chosen = chosen.index_add(0, experts.reshape(-1), torch.ones(experts.numel(), device=device))
        probability = probability.index_add(0, part, probabilities.float())
    tokens = torch.cat([torch.full((1, 1), float(tokens * len(router_logits)), device=device) for tokens in parts])
    return (chosen.view(count, num_experts) / tokens * (probability / tokens)).sum(dim=1) * num_experts
