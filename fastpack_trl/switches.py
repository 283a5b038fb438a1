"""The features that `FastSFTTrainer` installs around a run, beside its attention and its batches, in order.

A switch is a context manager over the trainer: entering installs what helps on this model and machine and writes its
line of the report, leaving restores. It reads the trainer and decides; the work is done in the room of the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fastpack_trl.lora.linear import apply_lora, has_lora

Switch = Callable[[Any], AbstractContextManager[None]]


def setting_of(trainer: Any, name: str) -> str:
    """The value of a field of `FastSFTConfig`; ``auto`` where the trainer was given a plain `SFTConfig`."""
    return str(getattr(trainer.args, name, "auto"))


@contextmanager
def lora(trainer: Any) -> Iterator[None]:
    """LoRA projections without glue, while the model trains; evaluation by itself runs PEFT's."""
    setting, report = setting_of(trainer, "lora"), trainer.fastpack_report
    present = has_lora(trainer.model)
    if not trainer.fastpack_trains or not (present or setting == "on"):
        yield
        return
    why = "" if present else "the model has no LoRA layers"
    if setting == "off":
        why = "switched off"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why = "parameters are sharded while the step runs"
    if why:
        report.add("lora", "stock" if present and setting != "off" else "off", "PEFT", why)
        yield
        return
    dtype = trainer.fastpack_compute_dtype
    applied = apply_lora(trainer.model, cache_dequantized=setting_of(trainer, "cache_dequantized"), compute_dtype=dtype)
    try:
        report.add("lora", "on" if applied.fast else "stock", "fast" if applied.fast else "PEFT", str(applied))
        yield
    finally:
        applied.revert()


SWITCHES: tuple[Switch, ...] = (lora,)
"""Entered from first to last when `train`, `evaluate` or `predict` begins, left in the opposite order."""
