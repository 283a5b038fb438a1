"""The switches `activation_memory` and `checkpoint_offload` of `FastSFTTrainer`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpack_trl.checkpointing import memory
from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.callback import (
    MODES,
    AsyncCheckpointCallback,
    checkpointing_arguments,
    offload_conflict,
)
from fastpack_trl.checkpointing.offload import Mode, offload_unavailable
from fastpack_trl.config import setting_of

logger = logging.getLogger(__name__)

FEATURE = "checkpoint_offload"


@contextmanager
def activation_memory(trainer: Any) -> Iterator[None]:
    """Every layer at a level that fits the memory, while `trainer` trains; off, all is as its `SFTConfig` says.

    Raises:
        ValueError: a level was asked for that another setting excludes.
    """
    args, report = trainer.args, trainer.fastpack_report
    setting = setting_of(args, memory.FEATURE)
    if not trainer.fastpack_trains:
        yield
        return
    planned, reason = _plan(trainer, setting)
    if planned is None:
        report.add(memory.FEATURE, "off", "stock", reason)
        yield
        return
    planned.report()
    trainer.add_callback(planned)
    trainer.fastpack_memory = planned
    try:
        yield
    finally:
        trainer.fastpack_memory = None
        planned.close()
        trainer.remove_callback(planned)
        if planned.measured is not None:
            report.facts["activation memory, peak"] = (
                f"{planned.measured / GIB:.2f} GiB measured, {planned.plan.predicted / GIB:.2f} GiB predicted"
            )


def _plan(trainer: Any, setting: str) -> tuple[memory.ActivationMemory | None, str]:
    """The plan, or why there is none."""
    reason = memory.why_not(trainer, setting)
    if reason:
        return None, reason
    try:
        return memory.plan_memory(trainer, setting, offload_options(trainer.args)), ""
    except memory.CANNOT_PLAN as error:
        why = f"no plan can be made: {type(error).__name__}: {error}"
        if setting != "auto":
            raise ValueError(f"activation_memory={setting!r}: {why}") from error
        return None, why


def offload_options(args: Any) -> dict[str, Any]:
    """How layers at the level ``offload`` are offloaded."""
    return {
        "mode": "single_buffer" if setting_of(args, FEATURE) == "single_buffer" else "double_buffer",
        "offload_budget_gib": setting_of(args, "offload_budget_gib"),
    }


@contextmanager
def checkpoint_offload(trainer: Any) -> Iterator[None]:
    """Layer inputs in host memory while `trainer` trains, where its config asks for it.

    ``auto`` leaves it to the plan of `activation_memory`: without need, a copy only costs.

    Raises:
        ValueError: asked for together with another offload, or without checkpointing.
    """
    args, report = trainer.args, trainer.fastpack_report
    mode: Mode | None = next((mode for mode in MODES if setting_of(args, FEATURE) == mode), None)
    reason = _why_off(trainer, mode)
    if trainer.fastpack_memory is not None:
        mode, reason = None, "by the plan of activation_memory"
    if mode is None or reason or not trainer.fastpack_trains:
        report.add(FEATURE, "off", "stock", reason)
        yield
        return

    def say(message: str) -> None:
        report.add(FEATURE, "on", mode, message.removeprefix(f"{FEATURE}: "))
        logger.warning(message)

    callback = AsyncCheckpointCallback(
        mode,
        offload_budget_gib=setting_of(args, "offload_budget_gib"),
        keep_last_layers=setting_of(args, "keep_last_layers"),
        _say=say,
        _stays=True,
    )
    report.add(FEATURE, "on", mode, "asked for; layer inputs go to pinned host memory")
    trainer.add_callback(callback)
    try:
        yield
    finally:
        callback.close()
        trainer.remove_callback(callback)
        if callback.use is not None:
            report.facts["offload, host memory"] = str(callback.use)


def _why_off(trainer: Any, mode: Mode | None) -> str:
    """Why the offload stays off; empty where it runs.

    Raises:
        ValueError: asked for, and impossible by another setting.
    """
    args = trainer.args
    if mode is None:
        if setting_of(args, FEATURE) == "off":
            return "switched off"
        return "not needed: checkpoint_offload='double_buffer' trades host memory for device memory"
    conflict = offload_conflict(args, trainer)
    enabled, keywords = checkpointing_arguments(args)
    if not conflict and not enabled:
        conflict = "gradient_checkpointing=False: without checkpointing no layer input is kept by itself"
    if not conflict and keywords.get("use_reentrant"):
        conflict = "use_reentrant=True stores layer inputs where no hook sees them: set it to False"
    if conflict:
        raise ValueError(f"checkpoint_offload={mode!r}: {conflict}")
    return offload_unavailable(args.device)
