"""Configs of the trainers that score completions: TRL's fields, and the ones of ours that apply."""

# ruff: noqa: RUF009 - `choice` and `option` return fields
from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig

from fastpack_trl.config import ModelSettings, Switch, choice
from fastpack_trl.model.preflight import check_counts


@dataclass
class RowSettings(ModelSettings):
    """The fields of a trainer whose batches become rows with shared prompts."""

    share_prefixes: Switch = choice(
        "auto",
        "Compute a prompt once for all its completions in a batch: auto and on (if the attention path supports it and "
        "all dropout, lora_dropout included, is 0), or off (the prompt is repeated). Same loss and gradients.",
    )
    cuda_graph: Switch = choice(
        "auto",
        "Replay the decoder as CUDA graphs, forward and backward, one pair per row size: auto (if the device is idle "
        "for 10 percent of an eager step, and enough steps are left), on (without these conditions), or off. The loss "
        "stays eager. Costs the activations of one micro-batch, held for the run. One process.",
    )

    def __post_init__(self) -> None:
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
class OnlineSettings(RowSettings):
    """The fields of a trainer that generates."""

    merge_accumulation: Switch = choice(
        "auto",
        "Run the micro-batches of an optimizer step forward together, so that completions that TRL has shuffled apart "
        "share their prompt: auto and on (on one process, without images or an auxiliary loss of experts, if memory "
        "permits) or off. Costs the activations of the whole step.",
    )


@dataclass
class FastGRPOConfig(OnlineSettings, GRPOConfig):
    """`trl.GRPOConfig` plus the switches of fastpack-trl that apply. An unchanged `GRPOConfig` works as well."""


@dataclass
class FastRLOOConfig(OnlineSettings, RLOOConfig):
    """`trl.RLOOConfig` plus the switches of fastpack-trl that apply. An unchanged `RLOOConfig` works as well."""
