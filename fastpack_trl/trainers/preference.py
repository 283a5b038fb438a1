"""`FastDPOTrainer`, `FastKTOTrainer` and `FastRewardTrainer`: TRL's, on rows in which each prompt is once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trl import DPOTrainer, KTOTrainer, RewardTrainer

from fastpack_trl.packing.prompt_groups import PromptGroups, completions, pairs
from fastpack_trl.trainers.featured import Of
from fastpack_trl.trainers.packed import PackedTrainer


class _ReferencedTrainer(PackedTrainer):
    """A trainer that compares with a reference, which may be computed before training."""

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """Compute TRL's log-probabilities of the reference, on rows."""
        with self._fastpack_on_rows(inputs):
            return super().compute_ref_log_probs(model, inputs)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fastpack_run.disabled:
            return super()._precompute_ref_logps(dataset, *args, **kwargs)
        self._fastpack_choose()
        with self._fastpack_features(), self._fastpack_collating():
            return super()._precompute_ref_logps(dataset, *args, **kwargs)

    def _fastpack_find(self) -> Callable[..., PromptGroups | str] | None:
        return completions


class FastDPOTrainer(_ReferencedTrainer, DPOTrainer):
    """`trl.DPOTrainer` on rows without padding, each prompt once: same arguments, losses, log keys and files."""

    _fastpack_of = Of(DPOTrainer, "pairs", sequences=2)


class FastKTOTrainer(_ReferencedTrainer, KTOTrainer):
    """`trl.KTOTrainer` on rows without padding: same arguments, losses, log keys and files."""

    _fastpack_of = Of(KTOTrainer, "pairs")


class FastRewardTrainer(PackedTrainer, RewardTrainer):
    """`trl.RewardTrainer` on rows without padding; a pair shares its prefix. Same arguments and files."""

    _fastpack_of = Of(RewardTrainer, "pairs", sequences=2)

    def _fastpack_find(self) -> Callable[..., PromptGroups | str] | None:
        pad_token_id = self.model.config.get_text_config().pad_token_id
        return None if pad_token_id is None else partial(pairs, pad_token_id=pad_token_id)
