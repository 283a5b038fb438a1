"""The configs of all trainers: TRL's fields, and the ones of ours that apply."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields

from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from fastpack_trl.config import OnlineSettings, RowSettings, Settings


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
class FastDPOConfig(RowSettings, DPOConfig):
    """`trl.DPOConfig` plus the switches of fastpack-trl that apply. An unchanged `DPOConfig` works as well."""


@dataclass
class FastRewardConfig(RowSettings, RewardConfig):
    """`trl.RewardConfig` plus the switches of fastpack-trl that apply. An unchanged `RewardConfig` works as well."""


@dataclass
class FastKTOConfig(RowSettings, KTOConfig):
    """`trl.KTOConfig` plus the switches of fastpack-trl that apply. An unchanged `KTOConfig` works as well."""


@dataclass
class FastGRPOConfig(OnlineSettings, GRPOConfig):
    """`trl.GRPOConfig` plus the switches of fastpack-trl that apply. An unchanged `GRPOConfig` works as well."""


@dataclass
class FastRLOOConfig(OnlineSettings, RLOOConfig):
    """`trl.RLOOConfig` plus the switches of fastpack-trl that apply. An unchanged `RLOOConfig` works as well."""
