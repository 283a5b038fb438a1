"""Faster packed supervised fine-tuning for Hugging Face TRL, without changing what is computed.

Importing this package patches and registers nothing and touches no network and no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpack_trl._version import __version__

if TYPE_CHECKING:
    from fastpack_trl.attention.install import packed_attention
    from fastpack_trl.attention.proof import verify_packing
    from fastpack_trl.callbacks.async_checkpoint import AsyncCheckpointCallback
    from fastpack_trl.callbacks.throughput import ThroughputCallback
    from fastpack_trl.lora.linear import apply_lora
    from fastpack_trl.moe.apply import apply_moe
    from fastpack_trl.packing.collator import PackingCollator
    from fastpack_trl.packing.packed_batch import PackedBatch
    from fastpack_trl.trainers.configs import (
        FastDPOConfig,
        FastGRPOConfig,
        FastKTOConfig,
        FastRewardConfig,
        FastRLOOConfig,
        FastSFTConfig,
    )
    from fastpack_trl.trainers.online import FastGRPOTrainer, FastRLOOTrainer
    from fastpack_trl.trainers.preference import FastDPOTrainer, FastKTOTrainer, FastRewardTrainer
    from fastpack_trl.trainers.sft import FastSFTTrainer

_HOME = {
    "AsyncCheckpointCallback": "callbacks.async_checkpoint",
    "FastDPOConfig": "trainers.configs",
    "FastDPOTrainer": "trainers.preference",
    "FastGRPOConfig": "trainers.configs",
    "FastGRPOTrainer": "trainers.online",
    "FastKTOConfig": "trainers.configs",
    "FastKTOTrainer": "trainers.preference",
    "FastRLOOConfig": "trainers.configs",
    "FastRLOOTrainer": "trainers.online",
    "FastRewardConfig": "trainers.configs",
    "FastRewardTrainer": "trainers.preference",
    "FastSFTConfig": "trainers.configs",
    "FastSFTTrainer": "trainers.sft",
    "PackedBatch": "packing.packed_batch",
    "PackingCollator": "packing.collator",
    "ThroughputCallback": "callbacks.throughput",
    "apply_lora": "lora.linear",
    "apply_moe": "moe.apply",
    "packed_attention": "attention.install",
    "verify_packing": "attention.proof",
}

__all__ = [
    "AsyncCheckpointCallback",
    "FastDPOConfig",
    "FastDPOTrainer",
    "FastGRPOConfig",
    "FastGRPOTrainer",
    "FastKTOConfig",
    "FastKTOTrainer",
    "FastRLOOConfig",
    "FastRLOOTrainer",
    "FastRewardConfig",
    "FastRewardTrainer",
    "FastSFTConfig",
    "FastSFTTrainer",
    "PackedBatch",
    "PackingCollator",
    "ThroughputCallback",
    "__version__",
    "apply_lora",
    "apply_moe",
    "packed_attention",
    "verify_packing",
]


def __getattr__(name: str) -> object:
    # Loaded on first use: `fastpack-trl --help` and `import fastpack_trl` need neither torch nor trl.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
