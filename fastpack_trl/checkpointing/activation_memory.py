"""The feature `activation_memory`: every layer at a level that fits the memory, while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fastpack_trl.checkpointing import memory
from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.levels import Level
from fastpack_trl.model.loop import called
from fastpack_trl.model.sharded import part_up
from fastpack_trl.run import ONCE_PARTED, Run


@contextmanager
def activation_memory(run: Run) -> Iterator[None]:
    """Install a plan of levels; off, all is as its `SFTConfig` says.

    Raises:
        ValueError: a level was asked for that another setting excludes.
    """
    if not run.training:
        yield
        return
    reason = run.ranks.agreed(lambda: memory.why_not(run))
    if reason:
        # What conflicts with a level raises; of these reasons one is that layers keep everything as it is.
        run.say(memory.FEATURE, "off", "stock", reason, holds=run.settings.activation_memory == "keep")
        yield
        return
    with ExitStack() as stack:
        if run.is_fsdp2:
            run.say(memory.FEATURE, "on", "pending", ONCE_PARTED)
            run.step.activations_left = 0  # `checkpoint_offload` is this plan's
            stack.callback(setattr, run, "activations_left", None)
            installed = stack.enter_context(ExitStack())
            stack.enter_context(called(run.trainer, at_begin=lambda: _install_sharded(run, installed)))
        else:
            _install(run, stack)
        yield


def _install_sharded(run: Run, installed: ExitStack) -> None:
    """Plan and install when training begins: only then are the parameters in their places."""
    installed.close()  # `train` may begin again by itself, with smaller batches
    try:
        planned = _install(run, installed)
    finally:
        part_up(run.model)
    if planned is not None:
        planned.keep_gathered()
        planned.on_train_begin(run.args, run.trainer.state, run.trainer.control)


def _install(run: Run, stack: ExitStack) -> memory.ActivationMemory | None:
    """Make the plan and keep it until `stack` closes."""
    planned, reason = _plan(run)
    if planned is None:
        run.say(memory.FEATURE, "off", "stock", reason)
        return None
    planned.report()
    # A rest that no further layer fits in is not given to what saves less per byte: a prediction may be a tenth off.
    recomputes = run.settings.activation_memory == "auto" and not planned.plan.keeps_all
    run.step.activations_left = 0 if recomputes else planned.plan.left
    run.step.activation_bytes = planned.plan.predicted + planned.head_bytes
    run.step.offloads = Level.OFFLOAD in planned.plan.levels
    stack.enter_context(_kept(run, planned))
    return planned


@contextmanager
def _kept(run: Run, planned: memory.ActivationMemory) -> Iterator[None]:
    run.trainer.add_callback(planned)
    try:
        with run.keeping(planned):
            yield
    finally:
        run.step.activations_left = None
        run.step.offloads = False
        planned.close()
        run.trainer.remove_callback(planned)
        if planned.measured is not None:
            run.report.facts["activation memory, peak"] = (
                f"{planned.measured / GIB:.2f} GiB measured, {planned.plan.predicted / GIB:.2f} GiB predicted"
            )
            run.report.facts["device memory, peak"] = f"{planned.reserved / GIB:.2f} GiB reserved, all included"


def _plan(run: Run) -> tuple[memory.ActivationMemory | None, str]:
    """Return the plan, or why there is none; the same levels in every process, and none where one has no plan.

    Raises:
        ValueError: no plan can be made for what was asked for; names the remedy.
    """
    setting = run.settings.activation_memory
    planned: memory.ActivationMemory | None = None

    def why_not() -> str:
        nonlocal planned
        try:
            with run.step.taking("plan"):
                planned = memory.plan_memory(run)
        except memory.CANNOT_PLAN as error:
            level = isinstance(error, memory.LevelError)
            why = str(error) if level else f"no plan can be made: {type(error).__name__}: {error}"
            if setting != "auto":
                raise ValueError(f"activation_memory={setting!r}: {why}; {run.remedy(memory.FEATURE)}") from error
            return why
        return ""

    why = run.ranks.agreed(why_not)
    if planned is None or why:
        return None, why
    agreed = run.ranks.most([float(level) for level in planned.plan.levels])
    # Times of its own may have told a process another plan; all would wait for the one that recomputes most.
    planned.adopt([Level(int(level)) for level in agreed])
    return planned, ""
