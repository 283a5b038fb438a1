"""The configs of all trainers: TRL's fields, and the ones of ours that apply."""

# ruff: noqa: RUF009 - `choice` and `option` return fields
from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields

from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from fastpack_trl.config import ModelSettings, Settings, Switch, choice


@dataclass
class FastSFTConfig(Settings, SFTConfig):
    """`trl.SFTConfig` plus the switches of fastpack-trl. An unchanged `SFTConfig` works as well.

    Explicit values such as ``on`` are strict: if the feature is unavailable, `train` raises with reason and fix.

    Raises:
        ValueError: a value outside its choices, a limit below 1, or two fields that contradict each other.
    """


FastSFTConfig.__doc__ = f"{FastSFTConfig.__doc__}\n    Args:\n" + "\n".join(
    textwrap.fill(f"{own.name}: {own.metadata['help']}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    for own in fields(Settings)
)


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
