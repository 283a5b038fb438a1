"""`FastDPOTrainer`, `FastKTOTrainer` and `FastRewardTrainer`: TRL's, on rows in which each prompt is once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trl import DPOTrainer, KTOTrainer, RewardTrainer

from fastpack_trl.packing.prompt_groups import PromptGroups, pairs
from fastpack_trl.trainers.packed import PackedTrainer
from fastpack_trl.trainers.reference import ReferencedTrainer


class FastDPOTrainer(ReferencedTrainer, DPOTrainer):
    """`trl.DPOTrainer` on rows without padding, each prompt once: same arguments, losses, log keys and files."""

    _fastpack_stock = DPOTrainer
    _fastpack_sequences = 2


class FastKTOTrainer(ReferencedTrainer, KTOTrainer):
    """`trl.KTOTrainer` on rows without padding: same arguments, losses, log keys and files."""

    _fastpack_stock = KTOTrainer


class FastRewardTrainer(PackedTrainer, RewardTrainer):
    """`trl.RewardTrainer` on rows without padding; a pair shares what it begins with. Same arguments and files."""

    _fastpack_stock = RewardTrainer
    _fastpack_sequences = 2

    def _fastpack_find(self) -> Callable[..., PromptGroups | str] | None:
        pad_token_id = self.model.config.get_text_config().pad_token_id
        return None if pad_token_id is None else partial(pairs, pad_token_id=pad_token_id)
