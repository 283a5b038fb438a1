"""`FastGRPOTrainer` and `FastRLOOTrainer`: TRL's, whose learner scores completions on rows with each prompt once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from fastpack_trl.packing.families import Families, find_families
from fastpack_trl.trainers.packed import PackedTrainer


class _OnlineTrainer(PackedTrainer):
    """One that generates; generation, rewards and their metrics are TRL's."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        stock: Any = super()
        known: list[tuple[Tensor, Families | str]] = []
        if self._fastpack_entered and self.fastpack_run.packs:
            known = self._fastpack_families(input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids))
        with self._fastpack_knowing(known):
            return stock._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )

    def _fastpack_families(
        self, ids: Tensor, attention_mask: Tensor, logits_to_keep: int, size: int
    ) -> list[tuple[Tensor, Families | str]]:
        """Return the row of each `size` rows of a batch of this learner; reads its tokens and masks, in one copy."""
        tokens, mask = torch.stack([ids, attention_mask.to(ids.dtype)]).cpu()
        scored = mask.clone()
        scored[:, :-logits_to_keep] = 0
        share = not self._fastpack_why_repeated(self.model.training)
        parts = zip(ids.split(size), tokens.split(size), mask.split(size), scored.split(size), strict=True)
        return [(own, find_families(*host, share=share)) for own, *host in parts]


class FastGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = GRPOTrainer


class FastRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """`trl.RLOOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = RLOOTrainer
