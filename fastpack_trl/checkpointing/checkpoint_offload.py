"""The feature `checkpoint_offload`: layer inputs in host memory while a trainer trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.checkpointing.callback import MODES, AsyncCheckpointCallback, offload_conflict
from fastpack_trl.checkpointing.offload import Mode, offload_unavailable
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)

FEATURE = "checkpoint_offload"


@contextmanager
def checkpoint_offload(run: Run) -> Iterator[None]:
    """Offload layer inputs where the config asks for it.

    ``auto`` leaves it to the plan of `activation_memory`: without need, a copy only costs.

    Raises:
        ValueError: asked for under an engine that excludes it.
    """
    mode: Mode | None = next((mode for mode in MODES if run.settings.checkpoint_offload == mode), None)
    reason = _why_off(run, mode)
    if run.step.activations_left is not None:
        mode, reason = None, "by the plan of activation_memory"
    if mode is None or reason or not run.training:
        # By that plan, in the mode that is asked for; or the memory of the layers is the host's already.
        run.say(FEATURE, "off", "stock", reason, holds=True)
        yield
        return

    def say(message: str) -> None:
        run.say(FEATURE, "on", mode, message.removeprefix(f"{FEATURE}: "))
        logger.warning(message)

    callback = AsyncCheckpointCallback(
        mode,
        offload_budget_gib=run.settings.offload_budget_gib,
        keep_last_layers=run.settings.keep_last_layers,
    )
    callback._say = say
    run.say(FEATURE, "on", mode, "asked for; layer inputs go to pinned host memory")
    run.trainer.add_callback(callback)
    run.step.offloads = True
    try:
        yield
    finally:
        callback.close()
        run.trainer.remove_callback(callback)
        run.step.offloads = False
        if callback.use is not None:
            run.report.facts["offload, host memory"] = str(callback.use)


def _why_off(run: Run, mode: Mode | None) -> str:
    """Return why the offload stays off; empty if it runs.

    Raises:
        ValueError: asked for, and impossible by another setting.
    """
    if mode is None:
        if run.settings.checkpoint_offload == "off":
            return "switched off"
        return "not needed: checkpoint_offload='double_buffer' trades host memory for device memory"
    conflict = offload_conflict(run.args, run.trainer)
    if conflict and run.training:
        raise ValueError(f"checkpoint_offload={mode!r}: {conflict}; set checkpoint_offload='auto' to train without it")
    return offload_unavailable(run.device)
