"""FSDP 2 on the CPU: accelerate's own wrapping, of a trainer that it would have started with DDP.

accelerate chooses FSDP on accelerators only. Its state is told here, once the trainer is made, what
``accelerate launch --use_fsdp --fsdp_version 2`` would have; all that follows is accelerate's and torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


@contextmanager
def fsdp2(trainer: Any, **plugin: Any) -> Iterator[Any]:
    """Let `trainer` train under FSDP 2 with fields of accelerate's plugin; the process is as before afterwards."""
    plugin = {"cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT"} | plugin
    chosen = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **plugin)
    whole, part = AcceleratorState._shared_state, PartialState._shared_state
    before = part["distributed_type"]
    part["distributed_type"] = whole["distributed_type"] = DistributedType.FSDP
    whole["fsdp_plugin"] = chosen
    trainer.is_fsdp_enabled = True
    assert trainer.accelerator.is_fsdp2
    try:
        yield trainer
    finally:
        part["distributed_type"] = whole["distributed_type"] = before
        whole["fsdp_plugin"] = None
