"""The feature `activation_memory`: every layer at a level that fits the memory, deeper ones when it runs out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from fastpack_trl.checkpointing.checkpoint_offload import offload_conflict, offload_unavailable
from fastpack_trl.checkpointing.offload import Mode
from fastpack_trl.checkpointing.plan import LayerCost, Level, Plan, describe, layer_levels
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches
from fastpack_trl.errors import first_reason
from fastpack_trl.model import sharded
from fastpack_trl.model.changes import callbacks_added, during_training
from fastpack_trl.model.checkpoint_seam import checkpointable_layers, stock_checkpoint
from fastpack_trl.model.facts import UNREADABLE
from fastpack_trl.model.hooks import HookWatch
from fastpack_trl.model.preflight import against_plan, check_recompute
from fastpack_trl.run import ONCE_SHARDED, Run
from fastpack_trl.run.budget import budget_bytes, head_bytes, largest_dense, largest_row

logger = logging.getLogger(__name__)

FEATURE = "activation_memory"
AMPLE = 2.0
"""Memory left per byte of gathered weights, from which on FSDP 2 keeps them; half stays for what no plan counts."""


@contextlib.contextmanager
def activation_memory(run: Run) -> Iterator[None]:
    """Install a plan of levels; off, all is as its `SFTConfig` says.

    Raises:
        ValueError: a level was requested that another setting excludes.
    """
    reason = run.ranks.first_reason(lambda: first_reason(_why_not(run)))
    if reason:
        # A conflict with a requested level has raised. One of these reasons is that layers keep everything anyway.
        run.set_status(FEATURE, "off", "stock", reason, holds=run.settings.activation_memory == "keep")
        yield
        return
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
            memory = ActivationMemory(run)
    except UNREADABLE as error:
        reason = f"no plan can be made: {type(error).__name__}: {error}"
        if setting != "auto":
            raise ValueError(f"activation_memory={setting!r}: {reason}; {run.remedy(FEATURE)}") from error
        run.set_status(FEATURE, "off", "stock", reason)
        return None
    # Its own free memory may have given a process another plan; all would wait for the one that recomputes most.
    recomputed, below = run.ranks.all_max([-memory.plan.count, memory.plan.below])
    plan = memory.plan = memory.plan.last_kept(-int(recomputed), Level(int(below)))
    memory.report()
    # A rest that no further layer fits in is not given to what saves less per byte: a prediction may be a tenth off.
    run.step.activations_left = 0 if setting == "auto" and not plan.keeps_all else plan.left
    run.step.activation_bytes = plan.predicted + memory.head_bytes
    run.step.offloads = Level.OFFLOAD in plan.levels
    stack.callback(memory.end)
    stack.enter_context(callbacks_added(run.trainer, memory))
    stack.enter_context(run.keeping(memory))
    return memory


class ActivationMemory(TrainerCallback):
    """A model's layers at the levels of a plan while training runs.

    Made by counting what layers keep. Each fallback is reported.

    Args:
        run: whose trainer trains.

    Attributes:
        plan: the levels.
        head_bytes: memory of the head's step, which is in no budget of the layers.
        gathered: layers whose weights FSDP 2 gathers once for forward and backward pass.

    Raises:
        ValueError: rows of any length.
        RuntimeError: the decoder cannot be run by itself, or another process cannot plan.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._notes, setting = run, list[str](), run.settings.activation_memory
        with run.ranks.propagate_failures():  # none may run a sharded model without the others
            tokens, longest = largest_row(run)
            self.head_bytes, own = head_bytes(run.model, tokens), float(budget_bytes(run, self._say))
        budget = max(0, int(run.ranks.all_min([own])[0]) - self.head_bytes)
        dense, can_offload = largest_dense(run.model), not offload_unavailable(run.device)
        plan = Plan.keeping_all(count_layers(run), tokens, longest, budget, dense, can_offload)
        if setting == "auto":
            plan = plan.best()
            if not plan.fits:
                self._say(f"nothing fits the budget: {plan}")
        elif setting != "keep":
            plan = plan.last_kept(0, Level[setting.upper()])
        self.plan, self._layers = plan, checkpointable_layers(run.model)
        self.gathered: list[Any] = []
        # What a user's hooks see is as under TRL's checkpointing, unless the user chose the level.
        self._watches = [HookWatch(layer) for layer in self._layers if setting == "auto"]
        self._hooks: list[str] = []
        self._out_of_memory = ""
        self._stack = contextlib.ExitStack()

    def _say(self, message: str) -> None:
        self._notes.append(message)
        logger.warning(f"{FEATURE}: {message}")

    def keep_gathered(self) -> None:
        """Gather weights once a step if the plan keeps all and leaves room: all processes do, or none.

        FSDP gathers them for the backward pass again: as many collectives, copies and calls of the host, for memory
        that is free. Called once the parameters are sharded and the plan is agreed on.
        """
        run, layers = self._run, sharded.layer_units(self._run.model)
        needed = sharded.whole_bytes(layers, (run.compute_dtype or torch.float32).itemsize)
        reshards = run.trainer.accelerator.state.fsdp_plugin.reshard_after_forward is True and run.ranks.count > 1
        if run.ranks.all(reshards and self.plan.keeps_all and needed * AMPLE <= self.plan.left):
            self.gathered = layers
            self._notes.append(f"weights gathered once a step ({needed / GIB:.2f} GiB)")

    def begin(self) -> None:
        """Install the plan when training begins: checkpointing has just been switched on."""
        if self._run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._run.device)
        self._install()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install again if a hook of the user came or went, or if TRL's generation switched checkpointing on."""
        changed = [watch.look() for watch in self._watches] != self._hooks
        if changed or self._functions() != self._installed:
            self._install(changed)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the peak of what torch reserved."""
        if args.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(args.device) / GIB
            self._run.report.facts["device memory, peak"] = f"{reserved:.2f} GiB reserved, all included"

    def end(self) -> None:
        """Restore every layer."""
        self._run.step.activations_left, self._run.step.offloads = None, False
        self._stack.close()

    def _functions(self) -> list[Any]:
        return [(layer.gradient_checkpointing, stock_checkpoint(layer)) for layer in self._layers]

    def _install(self, changed: bool = True) -> None:
        self._stack.close()
        self._hooks = [watch.look() for watch in self._watches]
        run, levels = self._run, self._levels()
        mode: Mode = "single_buffer" if run.settings.checkpoint_offload == "single_buffer" else "double_buffer"
        self._stack.enter_context(layer_levels(self._layers, levels, mode))
        run.step.offloads = Level.OFFLOAD in levels
        run.step.version += changed
        self._installed = self._functions()
        self.report()

    def _levels(self) -> list[Level]:
        """Return the plan's levels; a layer with a user's hook is recomputed as under TRL: the hook sees it."""
        hooks = self._hooks or [""] * len(self._layers)
        levels = zip(self.plan.levels, hooks, strict=True)
        return [max(level, Level.CHECKPOINT) if hook else level for level, hook in levels]

    def report(self) -> None:
        """Set the plan's line in the report."""
        levels, notes = self._levels(), [str(self.plan), *self._notes, self._out_of_memory]
        if levels != list(self.plan.levels):
            notes.append(f"{describe(levels)} for {next(filter(None, self._hooks))}, which runs in each recompute")
        self._run.set_status(FEATURE, "on", " + ".join(map(str, sorted(set(levels)))), "; ".join(filter(None, notes)))

    def go_deeper(self) -> bool:
        """Install a plan with less after an out-of-memory; return False if there is none."""
        if (plan := self.plan.deeper()) is None:
            return False
        told = f"a step ran out of memory with {describe(self._levels())}; it was run again with less"
        if not self._out_of_memory:
            logger.warning(f"{FEATURE}: {told}")
        self._out_of_memory, self.plan = told, plan
        self._install()
        return True


def gathered_once(run: Run) -> contextlib.AbstractContextManager[None]:
    """Run a micro-batch in the context, with weights gathered once if a plan says so."""
    memory = run.get_state(ActivationMemory)
    return sharded.keep_unsharded(memory.gathered) if memory and memory.gathered else contextlib.nullcontext()


def _conflicts(run: Run) -> Iterator[object]:
    yield run.is_deepspeed and "DeepSpeed makes its own copies of weights and gradients, which the plan cannot count"
    yield offload_conflict(run.args, run.trainer)
    checkpoints = run.is_fsdp2 and run.trainer.accelerator.state.fsdp_plugin.activation_checkpointing
    yield checkpoints and "activation_checkpointing of FSDP decides what is kept"
    yield from against_plan(run.args, run.settings.activation_memory, run.settings.checkpoint_offload)


def _why_not(run: Run) -> Iterator[object]:
    """Yield why the user's own settings stay as they are, instead of a plan.

    Raises:
        ValueError: a level was requested that another setting excludes.
    """
    setting, has_budget = run.settings.activation_memory, run.settings.activation_memory_gib is not None
    yield setting == "off" and "switched off: as gradient_checkpointing says"
    check_recompute(run.args, setting, run.settings.checkpoint_offload, _conflicts(run))
    yield from _conflicts(run)
    if setting == "auto" and run.device.type != "cuda" and not has_budget:
        yield f"{run.device} has no memory of its own: activation_memory_gib=... plans for a budget"
    yield not checkpointable_layers(run.model) and "the model has no layers that transformers checkpoints"
    yield setting == "offload" and offload_unavailable(run.device)


def count_layers(run: Run) -> list[LayerCost]:
    """Count what each layer of the model keeps in a training step.

    Raises:
        RuntimeError: the decoder cannot be run by itself.
    """
    batches, layers = probe_batches(run.model, run.device), checkpointable_layers(run.model)
    decoder = run.trainer.model_wrapped if run.is_fsdp2 else None
    together = run.ranks.propagate_failures(sharded.FAILURE_GRACE_SECONDS) if run.is_fsdp2 else contextlib.nullcontext()
    with together, run.trainer.accelerator.autocast():
        return layer_costs(run.model, layers, batches, decoder=decoder, packs=run.packs)


def row_bytes(run: Run, costs: Sequence[LayerCost], tokens: int, longest: int) -> int:
    """Return the memory of a row's forward and backward pass, with the layers as they are set now."""
    plan = Plan.keeping_all(costs, tokens, longest, 0, largest_dense(run.model))
    count = sum(not layer.gradient_checkpointing for layer in checkpointable_layers(run.model))
    return plan.last_kept(count).predicted + head_bytes(run.model, tokens)
