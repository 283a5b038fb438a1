"""`FastGRPOTrainer` and `FastRLOOTrainer`: TRL's, whose learner scores completions on rows with each prompt once.

TRL shuffles generated completions before it cuts them into micro-batches, so that completions of one prompt are spread
over many. The micro-batches of an optimizer step run forward together; TRL computes the loss of each separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from fastpack_trl.checkpointing.budget import free_bytes, memory_to_come
from fastpack_trl.checkpointing.planned import count_layers, row_bytes
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import UNREADABLE, learned_positions
from fastpack_trl.model.hooks import callback_between, hook_on_a_gradient, trained_parameters
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.prompt_groups import PromptGroups, group_completions
from fastpack_trl.trainers.packed import PackedTrainer

MERGING = "merge_accumulation"
_MEMORY_SHARE = 0.7
"""Share of the free device memory that the forward pass of a whole step may take by prediction."""
_IMAGES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")

Figures = tuple[Tensor, ...]
"""Log-probabilities and entropies, (rows, completion tokens)."""


class _OnlineTrainer(PackedTrainer):
    """A trainer that generates; generation, rewards and their metrics are TRL's."""

    _fastpack_kind = "online"
    _fastpack_why_single = ""
    """Why the micro-batches of a step run one by one; empty if they run together."""
    _fastpack_waiting: Sequence[tuple[Any, Figures]] = ()
    """The remaining micro-batches of a step that ran forward together, and the figures of each."""
    _fastpack_figures: Figures | None = None
    """Of the micro-batch whose loss TRL computes now; None if its forward pass is still to run."""
    _fastpack_fits = 0
    """Padded tokens of the largest step that fits in memory."""

    def _fastpack_plan(self, trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
        if learned_positions(trainer.model) is not None:
            return BatchPlan("stock", "prompts are padded on the left, which shifts learned positions")
        return super()._fastpack_plan(trainer, path, flattens, unproven)

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        super()._fastpack_enter(stack)
        self._fastpack_rows.entropy_has_gradient = bool(getattr(self, "_entropy_bonus_enabled", False))
        self._fastpack_fits = 0
        stack.callback(setattr, self, "_fastpack_waiting", ())
        why = self._fastpack_why_single = first_reason(self._fastpack_against_merging())
        if self.fastpack_run.training:
            path = "stock" if why else "one row per optimizer step"
            reason = why or f"{self.args.gradient_accumulation_steps} micro-batches per optimizer step, shuffled by TRL"
            self.fastpack_run.set_status(MERGING, "off" if why else "on", path, reason, holds=True)

    def _fastpack_against_merging(self) -> Iterator[object]:
        run, args = self.fastpack_run, self.args
        yield getattr(args, MERGING, "auto") == "off" and "switched off"
        yield not run.packs and "batches are padded by TRL"
        yield args.gradient_accumulation_steps == 1 and "gradient_accumulation_steps is 1"
        yield args.steps_per_generation % args.gradient_accumulation_steps != 0 and (
            f"steps_per_generation={args.steps_per_generation} is not a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}"
        )
        yield run.ranks.count > 1 and "each process reduces its gradients with its last micro-batch only"
        yield getattr(self, "aux_loss_enabled", False) and "the auxiliary loss of experts is per micro-batch"
        yield from self._fastpack_watchers(self.model.parameters())

    def _fastpack_watchers(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[object]:
        """Yield what sees each micro-batch, or its gradients: these exist after the last one only."""
        optim = str(getattr(self.args.optim, "value", self.args.optim)).lower()
        yield "lomo" in optim and f"optim={optim!r} steps in the backward pass"
        yield callback_between(self)
        yield hook_on_a_gradient(self.model, parameters)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss of a micro-batch, from the figures of its whole optimizer step."""
        merges = self._fastpack_entered and self.model.training and not self._fastpack_why_single
        if merges and not (self._fastpack_waiting and self._fastpack_waiting[0][0] is inputs):
            self._fastpack_waiting = self._fastpack_together(model, inputs)
        figures = None
        if merges and self._fastpack_waiting:
            (_, figures), *self._fastpack_waiting = self._fastpack_waiting
        with patch_attribute(self, "_fastpack_figures", figures):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _fastpack_together(self, model: Any, inputs: Any) -> Sequence[tuple[Any, Figures]]:
        """Run the forward pass of a step's micro-batches as one row; if it cannot, stop merging in this run."""
        stock: Any = self
        first = stock._step % self.args.steps_per_generation
        batches = stock._buffered_inputs[first : first + self.args.gradient_accumulation_steps]
        why = self._fastpack_why_single = first_reason(self._fastpack_against_step(inputs, batches))
        if why:
            self.fastpack_run.disable(MERGING, "stock", why)
            return ()
        parts = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
        ids, mask = (torch.cat([torch.cat([each[name] for name in pair], 1) for each in batches]) for pair in parts)
        keep = batches[0]["completion_ids"].shape[1]
        *figures, _ = stock._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
        split = (_split(figure, [len(each["prompt_ids"]) for each in batches]) for figure in figures)
        return list(zip(batches, zip(*split, strict=True), strict=True))

    def _fastpack_against_step(self, inputs: Any, batches: Sequence[Mapping[str, Any]]) -> Iterator[object]:
        args, run = self.args, self.fastpack_run
        is_next = len(batches) == args.gradient_accumulation_steps and batches[0] is inputs
        yield not is_next and "the micro-batches of a step are not the next of TRL's buffer"
        yield any(map(_has_images, batches)) and "there are images"
        yield from self._fastpack_watchers(trained_parameters(self.optimizer))
        width = sum(inputs[name].shape[1] for name in ("prompt_ids", "completion_ids"))
        tokens = width * sum(len(each["prompt_ids"]) for each in batches)
        if tokens <= self._fastpack_fits:
            return
        free = _MEMORY_SHARE * max(0, free_bytes(args.device) - memory_to_come(run))
        try:
            needed = row_bytes(run, count_layers(run), tokens, width)
        except UNREADABLE as error:
            yield f"the memory of the layers cannot be counted: {type(error).__name__}: {error}"
        else:
            gib = f"{needed / 2**30:.1f} GiB for the micro-batches of a step, {free / 2**30:.1f} GiB may be taken"
            yield needed > free and gib
        self._fastpack_fits = tokens

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._fastpack_figures is not None:
            return (*self._fastpack_figures, None)
        stock: Any = super()
        known: list[tuple[Tensor, PromptGroups | str]] = []
        if self._fastpack_entered and self.fastpack_run.packs:
            start = self._fastpack_positions.scaled_from
            if _has_images(kwargs):  # a shared prompt would have the images of all its copies
                self.fastpack_report.remark("batches", "padded by TRL if there are images")
            elif input_ids.shape[1] >= start:
                why = f"padded by TRL from {start:,} tokens on: left padding shifts positions, which scale attention"
                self.fastpack_report.remark("batches", why)
            else:
                known = self._fastpack_groups(input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids))
        with self._fastpack_knowing(known):
            return stock._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )

    def _fastpack_groups(
        self, ids: Tensor, attention_mask: Tensor, logits_to_keep: int, size: int
    ) -> list[tuple[Tensor, PromptGroups | str]]:
        """Return, for every `size` padded rows of a batch, the row that they become, by one read of the device."""
        tokens, mask = torch.stack([ids, attention_mask.to(ids.dtype)]).cpu()
        scored = mask.clone()
        scored[:, :-logits_to_keep] = 0
        parts = zip(ids.split(size), tokens.split(size), mask.split(size), scored.split(size), strict=True)
        found = [(own, group_completions(*host, **self._fastpack_form)) for own, *host in parts]
        if ids.device.type != "cuda":
            return found
        return [(own, each if isinstance(each, str) else each.pin_memory()) for own, each in found]


def _has_images(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in _IMAGES)


def _split(figure: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a figure of a whole step by micro-batches, whose losses run backward one after the other.

    Each but the last gets a copy, which keeps the gradient of its loss; the backward pass of the last runs for all.
    """
    *parts, last = figure.split_with_sizes(list(sizes))
    copies, start = [part.detach().requires_grad_(figure.requires_grad) for part in parts], len(figure) - len(last)

    def add(gradient: Tensor) -> Tensor:  # holds copies alone: `figure` or `last` would keep its graph alive
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in copies]
        return torch.cat([*gradients, gradient[start:]])

    if figure.requires_grad:
        figure.register_hook(add)
    return [*copies, last]


class FastGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = GRPOTrainer


class FastRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """`trl.RLOOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = RLOOTrainer
