"""The switch `checkpoint_offload` of `FastSFTTrainer`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpack_trl.checkpointing.callback import (
    MODES,
    AsyncCheckpointCallback,
    checkpointing_arguments,
    offload_conflict,
)
from fastpack_trl.checkpointing.seam import Mode, offload_unavailable

logger = logging.getLogger(__name__)

FEATURE = "checkpoint_offload"


@contextmanager
def checkpoint_offload(trainer: Any) -> Iterator[None]:
    """Layer inputs in host memory while `trainer` trains, where its config asks for it.

    ``auto`` leaves it to the plan of `activation_memory`: without need, a copy only costs.

    Raises:
        ValueError: asked for together with another offload, or without checkpointing.
    """
    args, report = trainer.args, trainer.fastpack_report
    mode: Mode | None = next((mode for mode in MODES if getattr(args, FEATURE, "auto") == mode), None)
    reason = _why_off(trainer, mode)
    if mode is None or reason:
        report.add(FEATURE, "off", "stock", reason)
        yield
        return

    def say(message: str) -> None:
        report.add(FEATURE, "on", mode, message.removeprefix(f"{FEATURE}: "))
        logger.warning(message)

    callback = AsyncCheckpointCallback(
        mode, offload_budget_gib=args.offload_budget_gib, keep_last_layers=args.keep_last_layers, _say=say
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
        if getattr(args, FEATURE, "auto") == "off":
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
