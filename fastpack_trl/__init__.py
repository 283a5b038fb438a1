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

_MODULES = {
    "attention.install": "packed_attention",
    "attention.proof": "verify_packing",
    "callbacks.async_checkpoint": "AsyncCheckpointCallback",
    "callbacks.throughput": "ThroughputCallback",
    "lora.linear": "apply_lora",
    "moe.apply": "apply_moe",
    "packing.collator": "PackingCollator",
    "packing.packed_batch": "PackedBatch",
    "trainers.configs": "FastDPOConfig FastGRPOConfig FastKTOConfig FastRLOOConfig FastRewardConfig FastSFTConfig",
    "trainers.online": "FastGRPOTrainer FastRLOOTrainer",
    "trainers.preference": "FastDPOTrainer FastKTOTrainer FastRewardTrainer",
    "trainers.sft": "FastSFTTrainer",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

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
