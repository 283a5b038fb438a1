"""The load-balancing loss of all layers at once (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

Stock goes layer by layer and keeps the softmax of each for backward. Here the layers are stacked, nothing but the
router logits is kept, and the gradient is a formula: the loss is linear in the mean routing probabilities.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastpack_trl.attention.model_features import text_model
from fastpack_trl.moe.layout import experts_modules

_CHUNK = 1 << 25
"""Logits that are stacked at once: 128 MiB in fp32, whatever the depth of the model."""

_HEAD = "load_balancing_loss_func"
_SHARED = "transformers.models.mixtral.modeling_mixtral"
"""Where trl's fused forward takes the loss from, for every family."""


def load_balancing_loss(
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    *,
    rows: int = 0,
) -> Tensor | int:
    """The auxiliary loss with the signature of transformers' `load_balancing_loss_func`, differentiable in the logits.

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
                probabilities += torch.einsum("lne,n->e", routing.float(), weight)
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
    """(layers, rows, E) pieces of at most `_CHUNK` elements, or one layer."""
    step = max(1, _CHUNK // max(1, logits[0].numel()))
    for start in range(0, len(logits), step):
        yield torch.stack([layer[: _rows(layer, rows)].to(device) for layer in logits[start : start + step]])


class _PackedRows:
    """Notes, before each forward, how many tokens of a packed row are no padding."""

    def __init__(self) -> None:
        self.rows = 0

    def note(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        batch = kwargs.get("packed_batch")
        self.rows = 0 if batch is None else batch.total_tokens - batch.num_padding

    def __call__(
        self, gate_logits: Any = None, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None
    ) -> Tensor | int:
        rows = self.rows if attention_mask is None else 0
        return load_balancing_loss(gate_logits, num_experts, top_k, attention_mask, rows=rows)


@contextlib.contextmanager
def auxiliary_loss(model: nn.Module) -> Iterator[bool]:
    """Inside, the auxiliary loss of `model` is `load_balancing_loss`, and the padding of packed rows does not count.

    Families whose config has no `num_experts` (deepseek_v3, glm4_moe, granitemoe), with which trl's forward fails, get
    that name as an alias of their own field.

    Yields:
        whether there was such a loss to replace.
    """
    base = text_model(model)
    homes = [sys.modules[type(base).__module__]]
    if (shared := _module(_SHARED)) is not None and shared not in homes:
        homes.append(shared)
    homes = [home for home in homes if hasattr(home, _HEAD)]
    if not homes or not experts_modules(model):
        yield False
        return
    ours = _PackedRows()
    with contextlib.ExitStack() as stack:
        for home in homes:
            stack.callback(setattr, home, _HEAD, getattr(home, _HEAD))
            setattr(home, _HEAD, ours)
        # First of all hooks: others take `packed_batch` out of the keywords.
        hook = base.register_forward_pre_hook(ours.note, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)
        stack.enter_context(_num_experts_alias(base.config.get_text_config()))
        yield True


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        return None


@contextlib.contextmanager
def _num_experts_alias(config: Any) -> Iterator[None]:
    """`config.num_experts` for families that spell it otherwise, through their class's own table of aliases."""
    names = ("num_local_experts", "n_routed_experts", "moe_num_experts")
    own = next((name for name in names if name in vars(config)), None)
    if hasattr(config, "num_experts") or own is None or not hasattr(type(config), "attribute_map"):
        yield
        return
    kind, before = type(config), vars(type(config)).get("attribute_map")
    kind.attribute_map = {**kind.attribute_map, "num_experts": own}
    try:
        yield
    finally:
        if before is None:
            del kind.attribute_map
        else:
            kind.attribute_map = before
