"""Layer inputs in host memory while a trainer trains: the feature `checkpoint_offload`, and a callback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_args

import torch
from transformers import Trainer, TrainerCallback

from fastpack_trl.checkpointing.offload import HostUse, Mode, Offload, checkpointed_layers, offload_checkpoints
from fastpack_trl.errors import first_reason, short_repr
from fastpack_trl.model.changes import callbacks_added, callers
from fastpack_trl.model.preflight import other_offload
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)

FEATURE = "checkpoint_offload"


def offload_unavailable(device: torch.device) -> str:
    """Return why offloading layer inputs gains nothing on `device`; empty if it may gain."""
    if device.type != "cuda":
        return f"the model is on {device}: there is no device memory to spare and no copy engine"
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        return f"{torch.cuda.get_device_name(device)} shares its memory with the host: nothing is freed by a copy"
    return ""


def offload_conflict(args: Any, trainer: Trainer | None = None) -> str:
    """Return which setting of a run excludes our offload, with the fix; empty if none does."""
    if (other := other_offload(args)) or trainer is None:
        return other
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed is not tested with the offload, so refused: leave one of them out"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP version 1 is not tested with the offload, so refused: set fsdp_version=2, or leave one of them out"
    return ""


@contextmanager
def checkpoint_offload(run: Run) -> Iterator[None]:
    """Offload layer inputs if the config asks for it.

    ``auto`` leaves it to the plan of `activation_memory`: without need, a copy only costs.

    Raises:
        ValueError: requested under an engine that excludes it.
    """
    mode: Any = run.settings.checkpoint_offload
    planned = run.step.activations_left is not None  # by the plan, in the requested mode
    conflict = "" if planned or mode in ("auto", "off") else offload_conflict(run.args, run.trainer)
    reason = conflict or first_reason(
        [
            planned and "by the plan of activation_memory",
            mode == "off" and "switched off",
            mode == "auto" and "not needed: checkpoint_offload='double_buffer' trades host memory for device memory",
            offload_unavailable(run.device),
        ]
    )
    if reason or not run.training:
        run.set_status(FEATURE, "off", "stock", reason, holds=not conflict)
        yield
        return

    callback = AsyncCheckpointCallback(mode)
    callback._options["tell"] = partial(run.set_status, FEATURE, "on", mode)
    run.set_status(FEATURE, "on", mode, "asked for; layer inputs go to pinned host memory")
    run.step.offloads = True
    try:
        with callbacks_added(run.trainer, callback), callback:
            yield
    finally:
        run.step.offloads = False
        if callback.use is not None:
            run.report.facts["offload, host memory"] = str(callback.use)


class AsyncCheckpointCallback(TrainerCallback):
    """Keep inputs of checkpointed layers in host memory, fetched ahead in backward; also for TRL's own `SFTTrainer`.

    ``SFTTrainer(..., callbacks=[AsyncCheckpointCallback()])``. Frees ``layers x tokens x hidden x itemsize`` bytes of
    the device; two inputs remain there. The copies overlap with the recompute. Loss and gradients are those of
    checkpointing without it, bit for bit. It is installed when training begins and taken out when it ends.

    transformers sends no event when training ends by an exception: what then runs with gradients is offloaded too,
    until the next `train()` installs it anew. `close()`, or a ``with`` block around `train()`, takes it out at once.

    Args:
        mode: ``double_buffer``, or ``single_buffer``: each input is fetched when it is needed.

    Attributes:
        offload: offload of the current run, with its use of host memory; None if it is off.
        use: host memory of the last run; None before.
        reason: why it is off on this machine; empty if it is on.

    Raises:
        ValueError: an unknown mode or a removed argument. When training begins: no checkpointing,
            `use_reentrant=True`, another offload, DeepSpeed or FSDP version 1.
    """

    def __init__(self, mode: Mode = "double_buffer") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode={short_repr(mode)} is not available: use one of {', '.join(get_args(Mode))}")
        self.mode: Mode = mode
        self.offload: Offload | None = None
        self.use: HostUse | None = None
        self.reason = ""
        self._options: dict[str, Any] = {}  # of `offload_checkpoints`
        self._stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Install the offload: checkpointing has just been switched on."""
        self.close()  # what an exception in an earlier run left behind
        if conflict := offload_conflict(args, next(callers(Trainer.train), None)):
            raise ValueError(f"AsyncCheckpointCallback: {conflict}")
        self.reason = offload_unavailable(args.device)
        if self.reason:
            logger.warning(f"{FEATURE}: off ({self.reason})")
            return
        offload = offload_checkpoints(checkpointed_layers(model), self.mode, **self._options)
        self.offload = self._stack.enter_context(offload)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self.close()

    def close(self) -> None:
        """Take the offload out of the model. May be called at any time, also twice."""
        self._stack.close()
        if self.offload is not None:
            self.use, self.offload = self.offload.use, None

    def __enter__(self) -> AsyncCheckpointCallback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
