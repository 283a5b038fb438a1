"""The feature `activation_memory`: every layer at a level that fits the memory, while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.checkpointing import memory
from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.levels import Level
from fastpack_trl.run import Run


@contextmanager
def activation_memory(run: Run) -> Iterator[None]:
    """Install a plan of levels; off, all is as its `SFTConfig` says.

    Raises:
        ValueError: a level was asked for that another setting excludes.
    """
    if not run.training:
        yield
        return
    planned, reason = _plan(run)
    if planned is None:
        run.say(memory.FEATURE, "off", "stock", reason)
        yield
        return
    planned.report()
    run.trainer.add_callback(planned)
    # A rest that no further layer fits in is not given to what saves less per byte: a prediction may be a tenth off.
    recomputes = run.settings.activation_memory == "auto" and not planned.plan.keeps_all
    run.activations_left = 0 if recomputes else planned.plan.left
    run.offloads = Level.OFFLOAD in planned.plan.levels
    try:
        with run.keeping(planned):
            yield
    finally:
        run.activations_left = None
        run.offloads = False
        planned.close()
        run.trainer.remove_callback(planned)
        if planned.measured is not None:
            run.report.facts["activation memory, peak"] = (
                f"{planned.measured / GIB:.2f} GiB measured, {planned.plan.predicted / GIB:.2f} GiB predicted"
            )


def _plan(run: Run) -> tuple[memory.ActivationMemory | None, str]:
    """Return the plan, or why there is none."""
    setting = run.settings.activation_memory
    reason = memory.why_not(run)
    if reason:
        return None, reason
    try:
        with run.taking("plan"):
            return memory.plan_memory(run), ""
    except memory.CANNOT_PLAN as error:
        why = f"no plan can be made: {type(error).__name__}: {error}"
        if setting != "auto":
            raise ValueError(f"activation_memory={setting!r}: {why}") from error
        return None, why
