"""The loss of a micro-batch as TRL normalises it, and its figures for the log, as one table for every kind of batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trl import SFTTrainer

from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.step.loss import ChosenLoss, ends


class StepLoss(NamedTuple):
    """The result of `step_loss`."""

    loss: Tensor
    """() fp32, with gradient."""
    table: Tensor
    """(num_parts, 3) fp32 without gradient, a row for each micro-batch: sum of the entropies, correct tokens, auxiliary
    loss (of no meaning where there is none). A row by itself is one part."""
    loss_tokens: list[int]
    """Tokens of each part with a loss."""
    edited: bool
    """Whether the labels are not the collator's any more."""


def step_loss(
    trainer: SFTTrainer,
    model: nn.Module,
    inputs: dict[str, Any],
    num_items_in_batch: Tensor | int | None,
    accumulation_steps: int,
    batch: PackedBatch | None,
) -> StepLoss:
    """Return the loss of one micro-batch, normalised as in TRL's ``compute_loss``, and its figures; keeps nothing.

    Args:
        trainer: a `SFTTrainer` whose model has a `LossForward`.
        num_items_in_batch: tokens with a loss in all micro-batches of the step (and, with
            ``average_tokens_across_devices``, of all ranks); None: the mean over this batch, as in evaluation.
        accumulation_steps: micro-batches of the step, which share the auxiliary loss.
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
        outputs = model(**inputs, loss_batch=batch, loss_type=loss_type)
    split = _Split(batch, outputs)
    items: Any
    ranks = 1
    if num_items_in_batch is None:
        items, steps = split.count(), 1
    else:
        # A mean per micro-batch: with a count of the whole step nobody else divides it by the micro-batches.
        items, steps = torch.as_tensor(num_items_in_batch).clamp(min=1), accumulation_steps
        if trainer.args.average_tokens_across_devices and trainer.accelerator.num_processes > 1:
            # All ranks are counted, and DDP takes the mean of the gradients over ranks.
            ranks = trainer.accelerator.num_processes // trainer.get_tp_size()

    loss = outputs.total / items
    if ranks > 1:
        loss = loss * ranks
    aux_losses = outputs.aux_loss if trainer.aux_loss_enabled else None
    if aux_losses is not None:
        loss = loss + trainer.router_aux_loss_coef * aux_losses.sum() / steps
    weights = outputs.weights
    entropy, correct = (
        split.sums(figures if weights is None else figures * weights) for figures in (outputs.entropy, outputs.is_top1)
    )
    figures = [entropy, correct, correct if aux_losses is None else aux_losses.detach().float()]
    table = torch.stack(figures)[None] if split.is_one else torch.stack(figures, dim=1)
    return StepLoss(loss, table, split.counted, outputs.positions is not None)


class _Split:
    """The micro-batches of a row, to which the positions of `outputs` belong.

    Attributes:
        sizes: positions of each. Synchronizes only after an edit of the labels.
        counted: tokens that the loss counts in each: more than positions where documents share some.
        is_one: the row is a micro-batch by itself.
    """

    def __init__(self, batch: PackedBatch | None, outputs: ChosenLoss) -> None:
        self.sizes: list[int] = []
        self.counted: list[int] = []
        parts = () if batch is None else batch.parts
        self.is_one = not parts
        if not parts:
            assert outputs.entropy is not None
            self.sizes = [outputs.entropy.numel()]
            documents = None if batch is None or outputs.weights is None else batch.documents
            self.counted = self.sizes if documents is None else [documents.loss_tokens]
        elif outputs.positions is None:
            self.sizes = [part.loss_tokens for part in parts]
            self.counted = [part.counted or part.loss_tokens for part in parts]
        else:
            bounds = torch.tensor(ends(parts), device=outputs.positions.device)
            part_of = torch.bucketize(outputs.positions, bounds, right=True)
            self.counted = self.sizes = part_of.bincount(minlength=len(parts)).tolist()

    def count(self) -> int:
        """Return the positions that the loss counts in the whole row, at least 1."""
        return max(1, sum(self.counted))

    def sums(self, figures: Tensor) -> Tensor:
        """Return the sum over each micro-batch, (num_parts,) fp32; () for a row by itself."""
        if self.is_one:
            return figures.sum(dtype=torch.float32)
        return torch.stack([part.sum(dtype=torch.float32) for part in figures.split(self.sizes)])


def _of_stock(outputs: Any, loss_type: str) -> ChosenLoss:
    """Read the result of TRL's forward at the positions with a loss; synchronises."""
    losses = -outputs.log_probs
    if loss_type == "dft":
        losses = losses * outputs.log_probs.exp().detach()
    mask = outputs.label_mask
    entropy, is_top1 = outputs.entropy.detach()[mask], outputs.is_top1[mask]
    return ChosenLoss(losses.sum(), outputs.log_probs.detach()[mask], entropy, is_top1, outputs.aux_loss)
