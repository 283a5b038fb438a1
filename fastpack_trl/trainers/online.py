"""`FastGRPOTrainer` and `FastRLOOTrainer`: TRL's, whose learner scores completions on rows with each prompt once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import learned_positions, position_use
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.prompt_groups import PromptGroups, group_completions
from fastpack_trl.step.merged_completions import Figures, has_images
from fastpack_trl.trainers.featured import Of
from fastpack_trl.trainers.packed import PackedTrainer


class _OnlineTrainer(PackedTrainer):
    """A trainer that generates; generation, rewards and their metrics are TRL's."""

    _fastpack_figures: Figures | None = None
    """Of the micro-batch whose loss TRL computes now; None if its forward pass is still to run."""

    def _fastpack_plan(self, trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
        if learned_positions(trainer.model) is not None:
            return BatchPlan("stock", "prompts are padded on the left, which shifts learned positions")
        return super()._fastpack_plan(trainer, path, flattens, unproven)

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        super()._fastpack_enter(stack)
        self._fastpack_scaled_from = position_use(self.model, getattr(self, "ref_model", None)).scaled_from
        self._fastpack_rows.entropy_has_gradient = bool(getattr(self, "_entropy_bonus_enabled", False))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss of a micro-batch, from the figures of its whole optimizer step."""
        merging = self.fastpack_run.merging if self.model.training else None
        figures = None if merging is None else merging.figures(model, inputs)
        with patch_attribute(self, "_fastpack_figures", figures):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._fastpack_figures is not None:
            return (*self._fastpack_figures, None)
        stock: Any = super()
        known: list[tuple[Tensor, PromptGroups | str]] = []
        if self.fastpack_run.is_entered and self.fastpack_run.packs:
            start = self._fastpack_scaled_from
            if has_images(kwargs):  # a shared prompt would have the images of all its copies
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
        found = [(own, group_completions(*host, **self._fastpack_rows.form)) for own, *host in parts]
        if ids.device.type != "cuda":
            return found
        return [(own, each if isinstance(each, str) else each.pin_memory()) for own, each in found]


class FastGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_of = Of(GRPOTrainer, "online")


class FastRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """`trl.RLOOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_of = Of(RLOOTrainer, "online")
