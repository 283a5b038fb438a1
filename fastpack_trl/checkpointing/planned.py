"""`ActivationMemory`: every layer at a level that fits the memory, deeper ones when it runs out."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from fastpack_trl.checkpointing.budget import budget_bytes, head_bytes, largest_dense, largest_row
from fastpack_trl.checkpointing.offload import Mode
from fastpack_trl.checkpointing.plan import LayerCost, Level, Plan, describe, layer_functions, layer_levels
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.checkpointing.tower import Size, is_planned_by_step, tower_cost
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches
from fastpack_trl.model import sharded
from fastpack_trl.model.checkpoint_seam import checkpointable_layers, stock_checkpoint
from fastpack_trl.model.facts import UNREADABLE
from fastpack_trl.model.hooks import HookWatch
from fastpack_trl.model.kinds import Kinds
from fastpack_trl.model.recompute import offload_unavailable
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)

FEATURE = "activation_memory"
_LESS = 0.8
"""Budget of later steps, as a share of what was predicted for one that ran out of memory."""
AMPLE = 2.0
"""Memory left per byte of gathered weights, from which on FSDP 2 keeps them; half stays for what no plan counts."""


class ActivationMemory(TrainerCallback):
    """A model's layers at the levels of a plan, made by counting what they keep, while training runs.

    Args:
        run: whose trainer trains.
        level: of all layers, or ``auto``: as much as fits.
        gib: budget of the activations; None: what is free.
        mode: of the offload.
        merges: micro-batches may run as one row.

    Attributes:
        plan: the levels.
        head_bytes: memory of the head's step, which is in no budget of the layers.
        gathered: layers whose weights FSDP 2 gathers once for forward and backward pass.

    Raises:
        ValueError: rows of any length.
        RuntimeError: the decoder cannot be run by itself, or another process cannot plan.
    """

    def __init__(self, run: Run, *, level: str, gib: float | None, mode: Mode, merges: bool) -> None:
        self._run, self._level, self._notes, self._mode = run, level, list[str](), mode
        self._by_step, self._limit = is_planned_by_step(run), (2**31, Level.KEEP)
        with run.ranks.propagate_failures():  # none may run a sharded model without the others
            row = None if self._by_step else largest_row(run, merges=merges)
            self._tower = tower_cost(run)
            own = float(budget_bytes(run, gib, self._say, of_images=self._by_step))
        self._budget = int(run.ranks.all_min([own])[0])
        self._dense, self._can_offload = largest_dense(run.model), not offload_unavailable(run.device)
        self._costs = count_layers(run)
        self.plan, self._layers = self._plan(self._first(row)), checkpointable_layers(run.model)
        if level == "auto" and not self.plan.fits:
            self._say(f"nothing fits the budget: {self.plan}")
        self.gathered: list[Any] = []
        # What a user's hooks see is as under TRL's checkpointing, unless the user chose the level.
        self._of_tower = [] if self._tower is None else list(self._tower.layers)
        self._watches = [HookWatch(layer) for layer in (*self._layers, *self._of_tower) if level == "auto"]
        self._hooks: list[str] = []
        self._left: deque[int] = deque(maxlen=32)  # of the last steps, without graphs
        self._out_of_memory, self._has_failed = "", False
        self._stack = contextlib.ExitStack()

    def _first(self, row: tuple[int, int] | None) -> Size:
        """Return the size of the largest row, or that of a first step: of copies of the largest of some examples."""
        run, each = self._run, int(self._run.args.per_device_train_batch_size)
        largest = Size(0, 0) if self._tower is None else self._tower.largest
        if row is None:
            return Size(largest.tokens * each, largest.longest, largest.numbers * each)
        return Size(*row, each * (largest.numbers if run.image_rows is None else run.image_rows.pixels))

    def _plan(self, size: Size) -> Plan:
        """Return the plan of a row."""
        self.head_bytes = head_bytes(self._run.model, size.tokens)
        self._whole, self._least = (0, 0) if self._tower is None else self._tower.at(size.numbers)
        budget = max(0, self._budget - self._held - self._least - self.head_bytes)
        plan = Plan.keeping_all(self._costs, size.tokens, size.longest, budget, self._dense, self._can_offload)
        if self._level == "auto":
            return plan.best() if self._tower is not None or not size.numbers else plan.last_kept(0)
        most, deepest = self._limit
        level = Level[self._level.upper()]
        return plan.last_kept(min(most, plan.count * (level is Level.KEEP)), max(level, deepest, Level.CHECKPOINT))

    @property
    def _held(self) -> int:
        return 0 if self._run.graphs is None else self._run.graphs.held

    @property
    def _keeps_tower(self) -> bool:
        """Return whether layers of towers keep everything: all of the decoder does, and there is room for it."""
        room = self._level == "keep" or self._whole - self._least <= self.plan.left
        return bool(self._of_tower) and self.plan.keeps_all and room and not any(self._hooks[len(self._layers) :])

    def plan_step(self, batches: Sequence[Any]) -> None:
        """Plan for the micro-batches of a step, and install what differs; by shapes, which the host knows."""
        if self._by_step:
            self._has_failed, levels, kept = False, self._levels(), self._keeps_tower
            self.plan = self._plan(Size.of(batches))
            self.share_rest()
            if (self._levels(), self._keeps_tower) != (levels, kept):
                self._install()

    def share_rest(self) -> None:
        """Set what the plan leaves, for CUDA graphs, and what a step takes."""
        step, plan = self._run.step, self.plan
        of_tower = 0 if any(self._hooks[len(self._layers) :]) else self._whole - self._least
        # A rest in which no layer fits is not given to what saves less per byte: a prediction may be a tenth off.
        is_usual, held = self._level != "auto" or plan.keeps_all, self._held
        left = plan.left + held if is_usual else 0
        left -= of_tower if self._of_tower and plan.keeps_all and left >= of_tower else 0
        if self._by_step:
            self._left.append(left)
            left = sorted(self._left)[len(self._left) // 4]
            if held > left and self._run.graphs is not None:
                self._run.graphs.drop()
        step.by_step, step.is_recordable = self._by_step, is_usual or not self._by_step
        step.activations_left = max(0, left - held)
        step.activation_bytes, step.offloads = plan.predicted + self.head_bytes, Level.OFFLOAD in plan.levels

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
            self._install()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the peak of what torch reserved."""
        if args.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(args.device) / GIB
            self._run.report.facts["device memory, peak"] = f"{reserved:.2f} GiB reserved, all included"

    def end(self) -> None:
        """Restore every layer."""
        step = self._run.step
        step.activations_left, step.offloads, step.levels = None, False, ()
        step.by_step, step.is_recordable = False, True
        self._stack.close()

    def _functions(self) -> list[Any]:
        return [(layer.gradient_checkpointing, stock_checkpoint(layer)) for layer in (*self._layers, *self._of_tower)]

    def _install(self) -> None:
        self._stack.close()
        self._hooks = [watch.look() for watch in self._watches]
        run, levels = self._run, self._levels()
        self._stack.enter_context(layer_levels(self._layers, levels, self._mode))
        if self._keeps_tower:
            self._stack.enter_context(layer_functions(self._of_tower, [None] * len(self._of_tower)))
        run.step.offloads, run.step.levels = Level.OFFLOAD in levels, tuple(levels)
        self._installed = self._functions()
        self.report()

    def _levels(self) -> list[Level]:
        """Return the plan's levels; a layer with a user's hook is recomputed as under TRL: the hook sees it."""
        hooks = self._hooks[: len(self._layers)] or [""] * len(self._layers)
        levels = zip(self.plan.levels, hooks, strict=True)
        return [max(level, Level.CHECKPOINT) if hook else level for level, hook in levels]

    def report(self) -> None:
        """Set the plan's line in the report."""
        levels, notes = self._levels(), [str(self.plan), *self._notes, self._out_of_memory]
        if self._tower is not None:
            kept = (self._whole, ", kept whole") if self._keeps_tower else (self._least, "")
            notes.insert(1, f"{kept[0] / GIB:.2f} GiB for the tower of images{kept[1]}")
        if self._by_step:
            without = "" if self._tower else "; no image in the examples looked at: steps with images recompute"
            notes.insert(1, f"planned again for each step{without}")
        if levels != list(self.plan.levels):
            notes.append(f"{describe(levels)} for {next(filter(None, self._hooks))}, which runs in each recompute")
        self._run.set_status(FEATURE, "on", " + ".join(map(str, sorted(set(levels)))), "; ".join(filter(None, notes)))

    def go_deeper(self) -> bool:
        """Install a plan with less after an out-of-memory; return False if there is none."""
        plan = self.plan.deeper()
        if plan is None and not self._keeps_tower:
            return False
        told = f"a step ran out of memory with {describe(self._levels())}; it was run again with less"
        if not self._out_of_memory:
            logger.warning(f"{FEATURE}: {told}")
        if not self._has_failed:  # steps of this size are planned with less from here on
            failed = self.plan.predicted + self.head_bytes + (self._whole if self._keeps_tower else self._least)
            self._budget, self._has_failed = min(self._budget, int(failed * _LESS)), True
        self._out_of_memory, self.plan = told, plan or self.plan
        self._limit = self.plan.count, self.plan.below
        self._install()
        return True


def gathered_once(run: Run) -> contextlib.AbstractContextManager[None]:
    """Run a micro-batch in the context, with weights gathered once if a plan says so."""
    memory: ActivationMemory | None = run.memory
    return sharded.keep_unsharded(memory.gathered) if memory and memory.gathered else contextlib.nullcontext()


def count_layers(run: Run) -> list[LayerCost]:
    """Count what each layer of the model keeps in a training step, in one process for one layer of each kind.

    Raises:
        RuntimeError: the decoder cannot be run by itself.
    """
    batches, layers = probe_batches(run.model, run.device), checkpointable_layers(run.model)
    decoder = run.trainer.model_wrapped if run.is_fsdp2 else None
    together = run.ranks.propagate_failures(sharded.FAILURE_GRACE_SECONDS) if run.is_fsdp2 else contextlib.nullcontext()
    with together, run.trainer.accelerator.autocast():
        if decoder is None:
            with contextlib.suppress(*UNREADABLE):  # layers that read what those before have made, which pass on
                stand_ins = (run.kinds or Kinds(run.model)).firsts
                return layer_costs(run.model, layers, batches, packs=run.packs, stand_ins=stand_ins)
        return layer_costs(run.model, layers, batches, decoder=decoder, packs=run.packs)


def row_bytes(run: Run, costs: Sequence[LayerCost], tokens: int, longest: int) -> int:
    """Return the memory of a row's forward and backward pass, with the layers as they are set now."""
    plan = Plan.keeping_all(costs, tokens, longest, 0, largest_dense(run.model))
    count = sum(not layer.gradient_checkpointing for layer in checkpointable_layers(run.model))
    return plan.last_kept(count).predicted + head_bytes(run.model, tokens)
