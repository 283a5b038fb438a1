"""The option `activation_memory`: every layer at a level that fits the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastpack_trl.checkpointing.plan import Level
from fastpack_trl.checkpointing.planned import FEATURE, ActivationMemory
from fastpack_trl.features.feature import Met
from fastpack_trl.model import sharded
from fastpack_trl.model.changes import callbacks_added, during_training, patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.model.facts import UNREADABLE
from fastpack_trl.model.recompute import against_plan, check_recompute, offload_conflict, offload_unavailable
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import ONCE_SHARDED, Run


def _conflicts(run: Run) -> Iterator[object]:
    yield run.is_deepspeed and "DeepSpeed makes its own copies of weights and gradients, which the plan cannot count"
    yield offload_conflict(run.args, run.trainer)
    checkpoints = run.is_fsdp2 and run.trainer.accelerator.state.fsdp_plugin.activation_checkpointing
    yield checkpoints and "activation_checkpointing of FSDP decides what is kept"
    yield from against_plan(run.args, run.settings.activation_memory, run.settings.checkpoint_offload)


def why_not(run: Run) -> Iterator[object]:
    """Yield why the user's own settings stay as they are, instead of a plan.

    Raises:
        ValueError: a level was requested that another setting excludes.
    """
    setting = run.settings.activation_memory
    check_recompute(run.args, setting, run.settings.checkpoint_offload, _conflicts(run))
    # A conflict with a requested level has raised. A reason against *keep* is that layers keep everything anyway.
    yield from (Met(why) if why and setting == "keep" else why for why in _reasons(run, setting))


def _reasons(run: Run, setting: str) -> Iterator[object]:
    yield from _conflicts(run)
    has_budget = run.settings.activation_memory_gib is not None
    if setting == "auto" and run.device.type != "cuda" and not has_budget:
        yield f"{run.device} has no memory of its own: activation_memory_gib=... plans for a budget"
    yield not checkpointable_layers(run.model) and "the model has no layers that transformers checkpoints"
    yield setting == "offload" and offload_unavailable(run.device)


@contextlib.contextmanager
def install(run: Run) -> Iterator[None]:
    """Install a plan of levels; off, all is as its `SFTConfig` says."""
    with contextlib.ExitStack() as stack:
        if run.is_fsdp2:
            run.set_status(FEATURE, "on", "pending", ONCE_SHARDED)
            run.step.activations_left = 0  # `checkpoint_offload` is this plan's
            stack.callback(setattr, run.step, "activations_left", None)
            installed = stack.enter_context(contextlib.ExitStack())
            stack.enter_context(during_training(run.trainer, at_begin=lambda: _install_sharded(run, installed)))
        elif (memory := plan_memory(run, stack)) is not None:
            stack.enter_context(during_training(run.trainer, at_begin=memory.begin))
        yield


def _install_sharded(run: Run, installed: contextlib.ExitStack) -> None:
    """Plan and install when training begins: only then are the parameters in their places."""
    installed.close()  # `train` may begin again by itself, with smaller batches
    try:
        memory = plan_memory(run, installed)
    finally:
        sharded.reshard_all(run.model)
    if memory is not None:
        memory.keep_gathered()
        memory.begin()


def plan_memory(run: Run, stack: contextlib.ExitStack) -> ActivationMemory | None:
    """Make the plan, the same in every process, and keep it until `stack` closes; None if any process has none.

    Raises:
        ValueError: no plan can be made for a requested level; names the remedy.
    """
    setting = run.settings.activation_memory
    try:
        with run.ranks.propagate_failures():
            memory = ActivationMemory(
                run,
                level=setting,
                gib=run.settings.activation_memory_gib,
                mode="single_buffer" if run.settings.checkpoint_offload == "single_buffer" else "double_buffer",
                merges=run.kind == "sft" and run.settings.merge_accumulation != "off" and not has_images(run.trainer),
            )
    except UNREADABLE as error:
        detail = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        reason = f"no plan can be made: {detail}"
        if setting != "auto":
            raise ValueError(f"activation_memory={setting!r}: {reason}; {run.remedy(FEATURE)}") from error
        run.set_status(FEATURE, "off", "stock", reason)
        return None
    # Its own free memory may have given a process another plan; all would wait for the one that recomputes most.
    recomputed, below = run.ranks.all_max([-memory.plan.count, memory.plan.below])
    memory.plan = memory.plan.last_kept(-int(recomputed), Level(int(below)))
    memory.report()
    memory.share_rest()
    stack.callback(memory.end)
    stack.enter_context(callbacks_added(run.trainer, memory))
    stack.enter_context(patch_attribute(run, "memory", memory))
    return memory
