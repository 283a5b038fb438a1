"""The loss of `FastSFTTrainer` at the positions that the collator chose: a forward laid around TRL's.

TRL selects the positions with a loss by a boolean mask, which makes the host ask the device how many there are. The
collator knows them (`PackedBatch.loss_positions`), so they are gathered by index.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from fastpack_trl.moe.aux_loss import experts_named, load_balancing_loss
from fastpack_trl.step.aux_loss import load_balancing_losses
from fastpack_trl.step.head import HeadLoss, head_loss, missing_tile_functions, reference_head_loss

_CONSTANTS = ("temperature", "cast_lm_head_to_fp32", "final_logit_softcapping", "logit_scale", "backbone_attr")
_FOR_STOCK = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")


@dataclass
class ChosenLoss(ModelOutput):
    """What the forward returns for a batch with `loss_positions`.

    Args:
        total: () fp32, sum of the losses of the N positions, with gradient.
        log_probs: (N,) fp32.
        entropy: (N,) fp32, in nats.
        is_top1: (N,) bool.
        aux_loss: () load-balancing loss where router logits are asked for; (num_parts,) of a merged row.
    """

    total: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    aux_loss: Tensor | None = None


class LossForward:
    """Lays a forward around the one that TRL gave `model`; to be done before accelerate wraps the model.

    A call with ``loss_positions`` and ``loss_labels`` (both (N,) int64) and ``loss_type`` returns a `ChosenLoss`; every
    other call goes to TRL's forward. `close` takes it away.

    Attributes:
        missing: why it could not be laid; empty where it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.missing = ""
        self._stock: Any = model.forward
        constants = _read_constants(self._stock)
        if isinstance(constants, str):
            self.missing = constants
            return
        self._lacks_tiles = missing_tile_functions()
        self._function = _around(_knowing_experts(self._stock.__func__), constants, self._lacks_tiles)
        model.forward = types.MethodType(self._function, model)

    @property
    def products(self) -> str:
        """Which head runs, for the report."""
        return f"logits made twice (trl lacks {self._lacks_tiles})" if self._lacks_tiles else "logits made once"

    @property
    def in_place(self) -> bool:
        """Whether a call of the model still comes by; someone may have replaced its forward since."""
        forward: Any = self.model.forward
        while forward is not None and not self.missing:
            if getattr(forward, "__func__", forward) is self._function:
                return True
            forward = getattr(forward, "__wrapped__", None)
        return False

    def close(self) -> None:
        """Give `model` TRL's forward back. Under a wrapper of accelerate's ours stays inside, without effect."""
        if not self.missing and getattr(self.model.forward, "__func__", None) is self._function:
            self.model.forward = self._stock


def head_of(model: nn.Module) -> tuple[Tensor, Tensor | None] | str:
    """Weight (V, H) and bias (V,) of the head, or why they cannot be read as plain tensors of this process."""
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return f"the head {type(head).__name__} has no weight of (vocabulary, hidden) floating-point numbers"
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 shards the head"
    if hasattr(weight, "full_tensor"):
        return "the head is a DTensor (FSDP2 or tensor parallel)"
    return weight, getattr(head, "bias", None)


def _read_constants(forward: Any) -> dict[str, Any] | str:
    """The numbers that TRL's forward holds in its closure, or what is missing."""
    function = getattr(forward, "__func__", None)
    found = dict(inspect.getclosurevars(function).nonlocals) if function is not None else {}
    lacks = [name for name in (*_CONSTANTS, "text_config") if name not in found]
    if lacks:
        return f"trl's fused head has no {', '.join(lacks)} in its closure"
    if found["temperature"] != 1.0 or found["cast_lm_head_to_fp32"]:
        return "trl's fused head was set up with a temperature or in fp32"
    return found


def _knowing_experts(forward: Any) -> Any:
    """TRL's forward, able to read the number of experts of every family."""
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    config = cells["text_config"].cell_contents
    if (named := experts_named(config)) is config:
        return forward
    cells["text_config"] = types.CellType(named)
    same = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, tuple(cells.values())
    )
    same.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(same, forward.__wrapped__)


def _around(stock: Callable[..., Any], constants: dict[str, Any], lacks_tiles: str) -> Callable[..., Any]:
    """The forward itself. It holds no model: a deep copy of the model runs its own layers."""
    text_config, backbone_attr = constants["text_config"], constants["backbone_attr"]
    compute: Callable[..., HeadLoss] = functools.partial(
        reference_head_loss if lacks_tiles else head_loss,
        logit_scale=constants["logit_scale"],
        softcap=constants["final_logit_softcapping"],
    )

    @functools.wraps(stock)  # `generate` checks its keywords against the signature of the class
    def forward(
        self: Any,
        *args: Any,
        loss_positions: Tensor | None = None,
        loss_labels: Tensor | None = None,
        loss_type: str = "nll",
        balanced_tokens: int = 0,
        **kwargs: Any,
    ) -> Any:
        if loss_positions is None:
            return stock(self, *args, **kwargs)
        assert loss_labels is not None, "loss_positions without loss_labels"
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_STOCK} | {"use_cache": False}
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        # Looked up on each call, as in TRL: PEFT and accelerate replace modules later.
        outputs = getattr(self, backbone_attr)(*args, **kwargs)
        head = head_of(self)
        if isinstance(head, str):
            raise RuntimeError(f"{head}: set sync_free='off'")
        hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, loss_positions)
        loss = compute(hidden, *head, loss_labels, loss_type=loss_type)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            logits, top_k = outputs.router_logits, text_config.num_experts_per_tok
            parts = [part.tokens for part in getattr(kwargs.get("packed_batch"), "parts", ())]
            if parts:
                aux_loss = load_balancing_losses(logits, top_k, parts)
            else:
                aux_loss = load_balancing_loss(logits, top_k=top_k, rows=balanced_tokens)
        return ChosenLoss(*loss, aux_loss=aux_loss)

    return forward


def batch_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None
) -> tuple[Tensor, Tensor, ChosenLoss]:
    """The loss of one micro-batch, normalised as in TRL's ``compute_loss``.

    Args:
        trainer: a `SFTTrainer` whose model has a `LossForward`.
        model: the model as accelerate wrapped it.
        inputs: its keywords, with a `PackedBatch` that has `loss_positions`.
        num_items_in_batch: tokens with a loss in all micro-batches of the step (and, with
            ``average_tokens_across_devices``, of all ranks); None: the mean over this batch, as in evaluation.

    Returns:
        The loss, () fp32; (num_parts,) fp32 without gradient, what each micro-batch of a merged row adds to it, which
        is one for a row by itself; and what the forward returned.
    """
    inputs["use_cache"] = False
    if trainer.aux_loss_enabled:
        inputs["output_router_logits"] = True
    batch = inputs["packed_batch"]
    loss_type = trainer.args.loss_type
    outputs = model(
        **inputs,
        fused_lm_head=True,
        loss_positions=batch.loss_positions,
        loss_labels=batch.loss_labels,
        loss_type=loss_type,
        balanced_tokens=batch.total_tokens - batch.num_padding,
    )
    items: Any = max(1, batch.loss_positions.numel())
    ranks = 1
    if num_items_in_batch is not None:
        items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        if trainer.args.average_tokens_across_devices and trainer.accelerator.num_processes > 1:
            # The count is that of every rank, and DDP takes the mean of the gradients over ranks.
            ranks = trainer.accelerator.num_processes // trainer.get_tp_size()
    # A mean per micro-batch: with a count of the whole step nobody else divides it by the micro-batches.
    steps = trainer.current_gradient_accumulation_steps if num_items_in_batch is not None else 1

    def normalised(total: Tensor, aux_loss: Tensor | None) -> Tensor:
        loss = total / items
        if ranks > 1:
            loss = loss * ranks
        return loss + trainer.router_aux_loss_coef * aux_loss / steps if trainer.aux_loss_enabled else loss

    if not batch.parts:
        loss = normalised(outputs.total, outputs.aux_loss)
        return loss, loss.detach()[None], outputs
    aux_losses = outputs.aux_loss if trainer.aux_loss_enabled else None
    loss = normalised(outputs.total, None if aux_losses is None else aux_losses.sum())
    losses = -outputs.log_probs
    if loss_type == "dft":
        losses = losses * outputs.log_probs.exp()
    totals = torch.stack([part.sum() for part in losses.split([part.loss_tokens for part in batch.parts])])
    return loss, normalised(totals, None if aux_losses is None else aux_losses.detach()), outputs
