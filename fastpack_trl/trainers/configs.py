"""Configs of the trainers that score completions: TRL's fields, and the ones of ours that apply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig

from fastpack_trl.config import ModelSettings, choice_field, normalise_choice
from fastpack_trl.model.preflight import check_counts


@dataclass
class RowSettings(ModelSettings):
    """The fields that a trainer has whose batches become rows with shared prompts."""

    share_prefixes: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=choice_field(
            "Completions of one prompt share it in a row, which has it once: auto and on (where attention has a form "
            "for it and no dropout is above 0) or off (each has a prompt of its own). Costs nothing."
        ),
    )

    def __post_init__(self) -> None:
        self.share_prefixes = normalise_choice("share_prefixes", self.share_prefixes, ("auto", "on", "off"))  # type: ignore[assignment]
        self.normalise()
        check_counts(self)
        super(ModelSettings, self).__post_init__()  # type: ignore[misc]


@dataclass
class FastDPOConfig(RowSettings, DPOConfig):
    """`trl.DPOConfig` plus the switches of fastpack-trl that apply. An unchanged `DPOConfig` works as well."""


@dataclass
class FastRewardConfig(RowSettings, RewardConfig):
    """`trl.RewardConfig` plus the switches of fastpack-trl that apply. An unchanged `RewardConfig` works as well."""


@dataclass
class FastKTOConfig(RowSettings, KTOConfig):
    """`trl.KTOConfig` plus the switches of fastpack-trl that apply. An unchanged `KTOConfig` works as well."""


@dataclass
class FastGRPOConfig(RowSettings, GRPOConfig):
    """`trl.GRPOConfig` plus the switches of fastpack-trl that apply. An unchanged `GRPOConfig` works as well."""


@dataclass
class FastRLOOConfig(RowSettings, RLOOConfig):
    """`trl.RLOOConfig` plus the switches of fastpack-trl that apply. An unchanged `RLOOConfig` works as well."""
