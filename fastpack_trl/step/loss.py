"""The loss of `FastSFTTrainer` at the positions that the collator chose, and its figures: a forward around TRL's.

TRL selects the positions with a loss by a boolean mask, which synchronizes to count them. The collator knows them
(`PackedBatch.loss_positions`), so they are gathered by index. Labels may be edited anywhere on their way, last by a
hook on the model: whether they are still the collator's is looked at here, where they arrive. The decoder is called by
`BackboneCall`, eagerly or from a recording.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from trl import SFTTrainer

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs
from fastpack_trl.step.head import head_loss, missing_tile_functions
from fastpack_trl.step.load_balancing import experts_named, load_balancing_losses

_CONSTANTS = (
    "temperature", "cast_lm_head_to_fp32", "final_logit_softcapping", "logit_scale", "backbone_attr", "outputs",
)  # fmt: skip
_FOR_STOCK = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")

ROUTER_LOGITS = "output_router_logits"
"""Keyword of a call that returns router logits too."""


class RowOutputs(NamedTuple):
    """The outputs of a replayed backbone, with the names that transformers' outputs have."""

    last_hidden_state: Tensor
    """(1, total_tokens, hidden)."""
    router_logits: tuple[Tensor, ...] | None = None
    """(total_tokens, num_experts) of each layer."""
    hidden_states: None = None
    attentions: None = None


class BackboneCall:
    """Calls backbones, the decoders without their heads, on packed rows.

    Attributes:
        replay: returns the outputs of a row from a recording, or None if the backbone has to be called; set by the
            feature ``cuda_graph``.
        batch: of the backbone that is running.
    """

    def __init__(self) -> None:
        self.replay: Callable[..., RowOutputs | None] | None = None
        self.batch: PackedBatch | None = None

    def __call__(self, backbone: Callable[..., Any], batch: PackedBatch, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of ``backbone(*args, **kwargs)``; the keywords are about `batch`, unless edited."""
        ids: Any = kwargs.get("input_ids")
        if self.replay is not None and not args and isinstance(ids, Tensor) and "packed_batch" in kwargs:
            own = to_transformers_kwargs(batch)
            if batch.describes(ids, kwargs.get("position_ids")) and own.keys() <= kwargs.keys():
                known = {*own, "input_ids", "packed_batch", "use_cache"}
                others = {name: value for name, value in kwargs.items() if name not in known}
                if (outputs := self.replay(backbone, batch, ids, others)) is not None:
                    return outputs
        with patch_attribute(self, "batch", batch):
            return backbone(*args, **kwargs)

    def replay_decoder(self, decoder: Any, kwargs: Mapping[str, Any]) -> RowOutputs | None:
        """Return the outputs of a decoder that gets embeddings from the running backbone; None if it has to be called.

        Its keywords are those that the attention has put in the place of ``packed_batch``.
        """
        batch, row, positions = self.batch, kwargs.get("inputs_embeds"), kwargs.get("position_ids")
        if self.replay is None or batch is None or not isinstance(row, Tensor):
            return None
        if "packed_layer" not in kwargs or not batch.describes(row, positions):
            return None
        mask = kwargs.get("attention_mask")
        masks = mask.values() if isinstance(mask, dict) else (mask,)  # one for each kind of layer
        if any(getattr(one, "shape", None) != (1, 1, 1, 1) for one in masks):  # of the model's own
            return None
        known = {"inputs_embeds", "position_ids", "attention_mask", "use_cache"}
        others = {name: value for name, value in kwargs.items() if name not in known and name[:7] != "packed_"}
        with patch_attribute(self, "batch", None):  # a call of the decoder is of another row
            return self.replay(decoder, batch, row, others, positions)


@dataclass
class ChosenLoss(ModelOutput):
    """Result of the forward at the positions with a loss.

    Args:
        total, entropy, is_top1: see `HeadLoss`.
        aux_loss: load-balancing loss of each micro-batch, (num_parts,), if router logits are requested.
        weights: (N,) fp32, number of documents that count each position; None: one.
        sizes: positions of each micro-batch in the row.
        counted: tokens that the loss counts in each: more than positions if documents share some.
        is_edited: the labels are no longer the collator's.
    """

    total: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    aux_loss: Tensor | None = None
    weights: Tensor | None = None
    sizes: list[int] | None = None
    counted: list[int] | None = None
    is_edited: bool | None = None


class OwnForward:
    """Replaces the forward of `model` by ``around(forward)``, before accelerate wraps it, if nothing is `missing`.

    A deep copy replaces that of the copied model by its own: the function alone would read objects of the original.
    """

    def __init__(self, model: nn.Module, around: Callable[[Any], Callable[..., Any]], missing: str) -> None:
        self.model, self._around, self.missing = model, around, missing
        self._stock: Any = model.forward
        self._lay()

    def _lay(self) -> None:
        if not self.missing:
            self._function: Any = self._around(self._stock)
            self.model.forward = types.MethodType(self._function, self.model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_function": None}  # pickle refuses closures

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if getattr(self.model.forward, "__wrapped__", None) is self._stock.__func__:  # pickle loses it, and TRL's
            self._lay()


class LossForward(OwnForward):
    """Lays a forward around the one that TRL gave `model`.

    A call with labels, their `PackedBatch` as ``loss_batch``, and ``loss_type`` returns a `ChosenLoss`; every other one
    goes to TRL's forward. With ``loss_means`` its total is the sum of the means over micro-batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.call_backbone = BackboneCall()
        constants, why_not = read_constants(model.forward)
        if not why_not and (constants["temperature"] != 1.0 or constants["cast_lm_head_to_fp32"]):
            why_not = "trl's fused head was set up with a temperature or in fp32"
        lacks = missing_tile_functions()
        missing = missing_reason("sync_free") or why_not or (f"trl lacks {lacks}" if lacks else "")
        super().__init__(model, functools.partial(_around, self.call_backbone), missing)

    @property
    def in_place(self) -> bool:
        """True while a call of the model reaches this forward; someone may have replaced it since."""
        forward: Any = self.model.forward
        while forward is not None and not self.missing:
            if getattr(forward, "__func__", forward) is self._function:
                return True
            forward = _inside(forward)
        return False


def head_of(model: nn.Module) -> tuple[Tensor, Tensor | None] | str:
    """Return weight (V, H) and bias (V,) of the head, or why they cannot be read.

    Under FSDP 2 they are DTensors but from the last norm, whose unit they belong to, to the end of backward.
    """
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return f"the head {type(head).__name__} has no weight of (vocabulary, hidden) floating-point numbers"
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 shards the head"
    return weight, getattr(head, "bias", None)


def whole_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the head, gathered where they are DTensors, as TRL's forward gathers its head."""
    head = head_of(model)
    if isinstance(head, str):
        raise RuntimeError(f"{head}: set sync_free='off'")
    weight, bias = (getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in head)
    return weight, bias


def _inside(forward: Any) -> Any:
    """Return the forward inside of one: a second trainer of a model lays TRL's and its own around what it finds."""
    function = getattr(forward, "__func__", forward)
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return cells.get("original_forward") or getattr(forward, "__wrapped__", None)


def read_constants(forward: Any) -> tuple[dict[str, Any], str]:
    """Return the closure of TRL's forward, and why it cannot be used, or ``""``."""
    function = getattr(forward, "__func__", None)
    found = dict(inspect.getclosurevars(function).nonlocals) if function is not None else {}
    lacks = [name for name in (*_CONSTANTS, "text_config") if name not in found]
    return found, f"trl's fused head has no {', '.join(lacks)} in its closure" if lacks else ""


def _around(call_backbone: BackboneCall, bound: Any) -> Callable[..., Any]:
    """Return the forward itself. It holds no model: a deep copy of the model runs its own layers."""
    stock, (constants, _) = bound.__func__, read_constants(bound)
    text_config, backbone_attr = constants["text_config"], constants["backbone_attr"]
    knowing_experts = experts_named(text_config)
    compute = functools.partial(
        head_loss, logit_scale=constants["logit_scale"], softcap=constants["final_logit_softcapping"]
    )

    @functools.wraps(stock)  # `generate` checks its keywords against the signature of the class
    def forward(
        self: Any,
        *args: Any,
        loss_batch: PackedBatch | None = None,
        loss_type: str = "nll",
        loss_means: bool = False,
        **kwargs: Any,
    ) -> Any:
        labels: Any = kwargs.get("labels")
        shift_labels: Tensor | None = kwargs.get("shift_labels")
        if loss_batch is None or (labels is None and shift_labels is None):
            if loss_batch is not None:
                kwargs["fused_lm_head"] = True  # taken out on the way: TRL's own says so
            with knowing_experts():
                return stock(self, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_STOCK} | {"use_cache": False}
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        # Looked up on each call, as in TRL: PEFT and accelerate replace modules later.
        outputs = call_backbone(getattr(self, backbone_attr), loss_batch, *args, **kwargs)
        hidden, documents, parts = outputs.last_hidden_state, loss_batch.documents, loss_batch.parts
        cut = documents is None and labels is not None and hidden.shape[:2] != labels.shape
        is_edited = shift_labels is not None or not loss_batch.counts(labels) or cut
        weights: Tensor | None = None
        if is_edited:
            positions, next_tokens, sizes = _find_positions(hidden, labels, shift_labels, loss_batch)
            counted = sizes
        else:
            positions, next_tokens = loss_batch.loss_positions, loss_batch.loss_labels
            assert positions is not None
            weights = documents.loss_weights if documents is not None else None
            sizes = [part.loss_tokens for part in parts] or [positions.numel()]
            whole = sizes if documents is None or weights is None else [documents.loss_tokens]
            counted = [part.counted or part.loss_tokens for part in parts] or whole
        chosen, factors = hidden.flatten(0, 1).index_select(0, positions), weights
        if loss_means:
            of_parts = zip(sizes, counted, strict=True)
            shares = torch.cat([torch.full((size,), 1 / max(1, n), device=hidden.device) for size, n in of_parts])
            factors = shares if weights is None else shares * weights
        loss = compute(chosen, *whole_head(self), next_tokens, weights=factors, loss_type=loss_type)
        asked = kwargs.get("output_router_logits")
        aux_loss = _balancing(outputs, text_config.num_experts_per_tok, loss_batch) if asked else None
        return ChosenLoss(loss.total, loss.entropy, loss.is_top1, aux_loss, weights, sizes, counted, is_edited)

    return forward


def _balancing(outputs: Any, top_k: int, batch: PackedBatch) -> Tensor:
    """Return the load-balancing loss of each micro-batch in a row, 0 without router logits; padding does not count."""
    hidden = outputs.last_hidden_state  # a row may have been cut short
    parts = [part.tokens for part in batch.parts] or [min(batch.total_tokens - batch.num_padding, hidden.shape[1])]
    copies = None if batch.documents is None else batch.documents.copies
    losses = load_balancing_losses(outputs.router_logits, top_k, parts, copies)
    return torch.zeros(len(parts), dtype=torch.float32, device=hidden.device) if losses is None else losses


def _find_positions(
    hidden: Tensor, labels: Any, shift_labels: Tensor | None, batch: PackedBatch
) -> tuple[Tensor, Tensor, list[int]]:
    """Return positions with a loss, their next tokens, and positions per micro-batch, by TRL's rule; synchronizes.

    Raises:
        ValueError: labels of another shape than the tokens.
    """
    documents = batch.documents
    shape = hidden.shape[:2] if documents is None else (1, documents.token_of.numel())
    tokens = [part.tokens for part in batch.parts] if documents is None else documents.parts if batch.parts else []
    ends = list(itertools.accumulate(tokens))
    next_tokens = shift_labels
    if next_tokens is None:
        next_tokens = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        next_tokens[:, [end - 1 for end in ends]] = IGNORE_INDEX  # what comes next is of another micro-batch
    if next_tokens.shape != shape:
        raise ValueError(
            f"labels of shape {tuple(next_tokens.shape)} for tokens of shape {tuple(shape)}: cut both alike"
        )
    next_tokens = next_tokens.to(hidden.device, torch.int64).flatten()
    has_loss = next_tokens.ne(IGNORE_INDEX)
    positions = has_loss.nonzero().squeeze(1)
    sizes = torch.stack([part.sum() for part in has_loss.tensor_split(ends[:-1])]).tolist()
    return positions if documents is None else documents.token_of[positions], next_tokens[positions], sizes


def step_loss(
    trainer: SFTTrainer,
    model: nn.Module,
    inputs: dict[str, Any],
    num_items_in_batch: Tensor | int | None,
    batch: PackedBatch | None,
) -> tuple[Tensor, Tensor, list[int], bool | None]:
    """Return the loss of one micro-batch, normalized as in TRL's ``compute_loss``, and its figures; keeps nothing.

    These are () fp32 with gradient; (num_parts, 3) fp32 without, a row for each micro-batch of a merged row: sum of the
    entropies, correct tokens, auxiliary loss (of no meaning if there is none); the tokens with a loss of each; and
    whether the labels are no longer the collator's.

    Args:
        num_items_in_batch: tokens with a loss in all micro-batches of the step (and, with
            ``average_tokens_across_devices``, of all ranks); None: the mean over this batch, as in evaluation.
        batch: of `inputs`, with `loss_positions`; None for the outputs of TRL's forward.
    """
    inputs["use_cache"] = False
    if trainer.aux_loss_enabled:
        inputs["output_router_logits"] = True
    loss_type = trainer.args.loss_type
    outputs: Any
    if batch is None:
        outputs = _of_stock(model(**inputs, fused_lm_head=True), loss_type)
    else:
        # Without `fused_lm_head`: TRL's forward of a trainer that was made since hands the call on to ours.
        means = {"loss_means": True} if num_items_in_batch is None and len(batch.parts) > 1 else {}
        outputs = model(**inputs, loss_batch=batch, loss_type=loss_type, **means)
    items: Any
    ranks = 1
    if num_items_in_batch is None:
        # Several micro-batches in a row: the loss is the sum of their means, which the trainer divides by their number.
        items, steps = 1 if batch is not None and len(batch.parts) > 1 else max(1, sum(outputs.counted)), 1
    else:
        # A mean per micro-batch: with a count of the whole step nobody else divides it by the micro-batches.
        items, steps = torch.as_tensor(num_items_in_batch).clamp(min=1), trainer.current_gradient_accumulation_steps
        if trainer.args.average_tokens_across_devices and trainer.accelerator.num_processes > 1:
            # All ranks are counted, and DDP takes the mean of the gradients over ranks.
            ranks = trainer.accelerator.num_processes // trainer.get_tp_size()

    loss = outputs.total / items
    if ranks > 1:
        loss = loss * ranks
    aux_losses = outputs.aux_loss if trainer.aux_loss_enabled else None
    if aux_losses is not None:
        loss = loss + trainer.router_aux_loss_coef * aux_losses.sum() / steps
    columns = [outputs.entropy, outputs.is_top1]
    if outputs.weights is not None:
        columns = [column * outputs.weights for column in columns]
    sums = [[part.sum(dtype=torch.float32) for part in column.split(outputs.sizes)] for column in columns]
    aux = sums[1] if aux_losses is None else aux_losses.detach().float().view(-1).unbind()
    table = torch.stack([*sums[0], *sums[1], *aux]).view(3, -1).t()
    return loss, table, outputs.counted, outputs.is_edited


def _of_stock(outputs: Any, loss_type: str) -> ChosenLoss:
    """Read the result of TRL's forward at the positions with a loss; synchronizes."""
    losses = -outputs.log_probs
    if loss_type == "dft":
        losses = losses * outputs.log_probs.exp().detach()
    mask = outputs.label_mask
    entropy, is_top1 = outputs.entropy.detach()[mask], outputs.is_top1[mask]
    sizes = [entropy.numel()]
    return ChosenLoss(losses.sum(), entropy, is_top1, outputs.aux_loss, sizes=sizes, counted=sizes)
