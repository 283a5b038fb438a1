"""The option `checkpoint_offload`: layer inputs in host memory while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastpack_trl.callbacks.async_checkpoint import AsyncCheckpointCallback
from fastpack_trl.features.feature import Met
from fastpack_trl.model.changes import callbacks_added, patch_attribute
from fastpack_trl.model.recompute import offload_conflict, offload_unavailable
from fastpack_trl.run import Run

FEATURE = "checkpoint_offload"


def why_not(run: Run) -> Iterator[object]:
    """Yield why no input is offloaded. ``auto`` leaves it to the plan of `activation_memory`: a copy only costs."""
    planned = run.step.activations_left is not None  # by the plan, in the requested mode
    yield planned and Met("by the plan of activation_memory")
    waits = run.settings.checkpoint_offload == "auto"
    yield waits and Met("not needed: checkpoint_offload='double_buffer' trades host memory for device memory")
    yield offload_conflict(run.args, run.trainer)
    yield Met(offload_unavailable(run.device))


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Offload layer inputs, as the config asks for."""
    mode = run.settings.checkpoint_offload
    callback = AsyncCheckpointCallback(mode)  # type: ignore[arg-type]  # neither auto nor off
    callback._options["tell"] = partial(run.set_status, FEATURE, "on", mode)
    run.set_status(FEATURE, "on", mode, "asked for; layer inputs go to pinned host memory")
    try:
        with patch_attribute(run.step, "offloads", True), callbacks_added(run.trainer, callback), callback:
            yield
    finally:
        if callback.use is not None:
            run.report.facts["offload, host memory"] = str(callback.use)
