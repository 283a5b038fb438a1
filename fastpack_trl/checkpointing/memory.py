"""The feature `activation_memory`: plan a level for every layer, install it, go deeper when memory runs out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.callback import offload_conflict
from fastpack_trl.checkpointing.levels import Level, describe, layer_levels
from fastpack_trl.checkpointing.offload import offload_unavailable
from fastpack_trl.checkpointing.plan import Growth, Plan, choose_levels, deeper, make_plan
from fastpack_trl.checkpointing.trace import DecoderRun, host_copy_seconds, trace_levels
from fastpack_trl.errors import first_reason
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.facts import backbones, keeps_logits, learned_positions, text_model, token_table
from fastpack_trl.model.hooks import HookWatch
from fastpack_trl.model.recompute import against_plan, check_recompute
from fastpack_trl.model.sharded import embeddings_put_in, gathered_bytes, layer_units, local, stay_gathered, whole_bytes
from fastpack_trl.model.upstream import GradientCheckpointingLayer
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.run import MERGED_ROW_TOKENS, Run

logger = logging.getLogger(__name__)

FEATURE = "activation_memory"
CANNOT_PLAN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
LEVEL_OF = {level: getattr(Level, level.upper()) for level in ("keep", "selective", "checkpoint", "offload")}
MARGIN = 0.9  # of the free memory; the allocator's gaps and what no trace sees need the rest
TIMED_TOKENS = 2048
AMPLE = 2.0
"""Budget per byte that `KEEP` keeps, from which on nothing is timed: a third of the trace's passes are left."""
_HEAD_BYTES = 12  # per token and hidden unit: last norm, its input, their gradients


class LevelError(ValueError):
    """Why the level that was asked for cannot be used."""


def checkpointable_layers(model: Any) -> list[GradientCheckpointingLayer]:
    """Return the layers of `model` that transformers can checkpoint, first to last."""
    return [module for module in text_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]


class ActivationMemory(TrainerCallback):
    """A model's layers at the levels of a plan while training runs.

    Args:
        run: whose trainer trains.
        layers: the decoder layers of its model.
        plan: what is installed when training begins.
        next_plan: the plan with less memory than the one given; None where there is none.
        plan_at: the plan that has the levels given.
        offload: arguments of `offload_checkpoints`.
        notes: what fell back while the plan was made.
        asked: whether the user chose the level; else what a user's hooks see is as stock's checkpointing has it.
        head_bytes: what the head's step takes beside the layers', which is in no budget of theirs.
    """

    def __init__(
        self,
        run: Run,
        layers: Sequence[GradientCheckpointingLayer],
        plan: Plan,
        next_plan: Callable[[Plan], Plan | None],
        plan_at: Callable[[Sequence[Level]], Plan],
        offload: dict[str, Any],
        notes: Sequence[str] = (),
        asked: bool = False,
        head_bytes: int = 0,
    ) -> None:
        self.plan, self.head_bytes = plan, head_bytes
        self._notes = list(notes)
        self._run, self._layers, self._next, self._offload = run, layers, next_plan, offload
        self._plan_at = plan_at
        self._stack = contextlib.ExitStack()
        self._watches = [] if asked else [HookWatch(layer) for layer in layers]
        self._hooks: list[str] = []
        self._asked, self._is_lean = asked, False
        self._installed = list(plan.levels)
        self._static = 0
        self.fell = ""
        """What the last step that ran out of memory fell back to; empty where none did."""
        self.gathered: list[Any] = []
        """Layers whose weights FSDP 2 gathers once for forward and backward pass."""
        self._gathered_bytes = 0
        self.measured: int | None = None
        """Peak bytes beside model, gradients and optimizer state, of the run that ended; None without a device."""
        self.reserved = 0
        """Bytes that torch held of the device at most, caches and CUDA graphs included."""

    def adopt(self, levels: Sequence[Level]) -> None:
        """Take the levels that all processes have agreed on, before any is installed."""
        if tuple(levels) != self.plan.levels:
            self.plan = self._plan_at(levels)

    def keep_gathered(self) -> None:
        """Gather weights once a step, where the plan keeps all and leaves room: all processes do, or none.

        FSDP gathers them for the backward pass again: as many collectives, copies and calls of the host, for memory
        that is free. Called once the parameters are parted and the plan is agreed on.
        """
        run, layers = self._run, layer_units(self._run.model)
        needed = whole_bytes(layers, (run.compute_dtype or torch.float32).itemsize)
        asked = run.trainer.accelerator.state.fsdp_plugin.reshard_after_forward is True and run.ranks.count > 1
        if run.ranks.all(asked and self.plan.keeps_all and needed * AMPLE <= self.plan.left):
            self.gathered, self._gathered_bytes = layers, needed

    def around_step(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward and its backward pass in the context, with weights gathered once where memory is ample."""
        return stay_gathered(self.gathered) if self.gathered else contextlib.nullcontext()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the plan: checkpointing has just been switched on."""
        self.close()
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
            self._static = torch.cuda.memory_allocated(args.device) + memory_to_come(self._run)
            self._static += self._gathered_bytes
        self._install()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install again where a hook of the user came or went, and after the first step."""
        if [watch.look() for watch in self._watches] != self._hooks or self._is_lean != self._shall_be_lean(self.plan):
            self._install()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the peak."""
        if args.device.type == "cuda":
            self.measured = torch.cuda.max_memory_allocated(args.device) - self._static
            self.reserved = torch.cuda.max_memory_reserved(args.device)

    def close(self) -> None:
        """Restore every layer."""
        self._stack.close()

    def _install(self) -> None:
        self._stack.close()
        self._hooks = [watch.look() for watch in self._watches]
        self._is_lean = self._shall_be_lean(self.plan)
        self._installed = self._to_install(self.plan)
        self._stack.enter_context(layer_levels(self._layers, self._installed, **self._offload))
        self._run.step.offloads = Level.OFFLOAD in self._installed
        self._run.step.layers_changed()
        self.report()

    def _to_install(self, plan: Plan) -> list[Level]:
        levels = self._levels(plan)
        return [max(level, Level.CHECKPOINT) for level in levels] if self._shall_be_lean(plan) else levels

    def _shall_be_lean(self, plan: Plan) -> bool:
        """Return whether layers are checkpointed for now, as stock has them, whatever the plan lets them keep.

        Uncompiled layers keep a third more than compiled ones. Where they are compiled after the first step, that step
        alone would set the peak of the run, to save the recompute of one step. What it takes is as planned where
        others go by it, and where inputs go to host memory: the copies would be set up twice.
        """
        run = self._run
        waits = run.step.in_first and run.compiles_later and not run.measures_first_step
        return waits and not self._asked and Level.OFFLOAD not in plan.levels

    def _levels(self, plan: Plan) -> list[Level]:
        """Return a plan's levels; a layer with a user's hook is recomputed where stock would: the hook sees it."""
        hooked = {index for index, hook in enumerate(self._hooks) if hook}
        levels = enumerate(plan.levels)
        return [Level.CHECKPOINT if index in hooked and level is Level.KEEP else level for index, level in levels]

    def report(self) -> None:
        """Set the plan's line in the report."""
        installed = self._levels(self.plan)
        levels = " + ".join(str(level) for level in sorted(set(installed)))
        notes = [*self._notes, self.fell] if self.fell else [*self._notes]
        if self.gathered:
            notes.append(f"weights gathered once a step ({self._gathered_bytes / GIB:.2f} GiB)")
        if installed != list(self.plan.levels):
            notes.append(f"{describe(installed)} for {next(filter(None, self._hooks))}, which runs in each recompute")
        self._run.say(FEATURE, "on", levels, "; ".join([str(self.plan), *notes]))

    def go_deeper(self) -> bool:
        """Free spare memory after an out-of-memory, or install a plan with less; return False if there is neither.

        While layers are checkpointed for now, a plan with less that they would be checkpointed for as well is none.
        """
        spared = self._run.step.reclaim_memory()
        plan = self.plan if spared else self._next(self.plan)
        while not spared and self._is_lean and plan is not None and self._to_install(plan) == self._installed:
            plan = self._next(plan)
        if plan is None:
            return False
        less = "without what is spare" if spared else "with less"
        told = f"a step ran out of memory with {describe(self._installed)}; it was run again {less}"
        if not self.fell:
            logger.warning(f"{FEATURE}: {told}")
        self.fell = told
        self.plan = plan
        self._install()
        return True


def _conflicts(run: Run) -> Iterator[object]:
    yield run.is_deepspeed and "DeepSpeed makes its own copies of weights and gradients, which no plan knows"
    yield offload_conflict(run.args, run.trainer)
    sharded = run.is_fsdp2 and run.trainer.accelerator.state.fsdp_plugin.activation_checkpointing
    yield sharded and "activation_checkpointing of FSDP says what to keep"
    yield from against_plan(run.args, run.settings.activation_memory, run.settings.checkpoint_offload)


def why_not(run: Run) -> str:
    """Return why the user's own settings stay as they are; empty if a plan may be made.

    Raises:
        ValueError: a level was asked for that another setting excludes.
    """
    setting = run.settings.activation_memory
    if setting == "off":
        return "switched off: as gradient_checkpointing says"
    check_recompute(run.args, setting, run.settings.checkpoint_offload, _conflicts(run))
    if conflict := first_reason(_conflicts(run)):
        return conflict
    if setting == "auto" and run.device.type != "cuda" and run.settings.activation_memory_gib is None:
        return f"{run.device} has no memory of its own: activation_memory_gib=... plans for a budget"
    return "" if checkpointable_layers(run.model) else "the model has no layers that transformers checkpoints"


def largest_row(run: Run) -> tuple[int, int]:
    """Return the tokens of the largest row, and of its longest document.

    Raises:
        ValueError: rows of any length.
    """
    args, facts = run.args, run.facts
    longest = args.max_length if facts is None or not facts.longest else min(args.max_length or 2**62, facts.longest)
    if longest is None:
        raise ValueError("max_length=None: rows may have any length")
    row = args.max_length if args.packing and args.max_length is not None else longest
    tokens = int(args.per_device_train_batch_size * row)
    if run.settings.merge_accumulation != "off":
        tokens = max(tokens, min(tokens * args.gradient_accumulation_steps, MERGED_ROW_TOKENS))
    return tokens, int(longest)


def decoder_run(run: Run) -> DecoderRun:
    """Return a function that runs the decoder on one document of so many tokens, as a training step does.

    On several where a table of positions ends before: GPT-2's has 1,024.

    Under FSDP 2 that is the whole model, with the logits of one token, in all processes at once.
    """
    model, embedding = backbones(run.model)[0], text_model(run.model).get_input_embeddings()
    table = token_table(run.model)
    packed, device, accelerator = run.packs, run.device, run.trainer.accelerator
    positions = learned_positions(run.model) or 2**62

    def decode(tokens: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(tokens, device=device)[None] % table.num_embeddings
        lengths = [min(positions, tokens - start) for start in range(0, tokens, min(positions, tokens))]
        batch = PackedBatch.from_lengths(lengths).to(device)
        kwargs = to_transformers_kwargs(batch) | ({"packed_batch": batch} if packed else {}) | {"use_cache": False}
        if run.is_fsdp2:
            leaf = torch.randn(1, tokens, table.embedding_dim, device=device).requires_grad_()
            last = {"logits_to_keep": 1} if keeps_logits(run.model) else {}
            with embeddings_put_in(run.model, leaf), accelerator.autocast():
                return leaf, run.trainer.model_wrapped(input_ids=ids, **kwargs, **last).logits
        leaf = embedding(ids).detach().requires_grad_()
        with accelerator.autocast():
            out = model(inputs_embeds=leaf.clone(), **kwargs)
        return leaf, out[0]

    return decode


def memory_to_come(run: Run) -> int:
    """Return the bytes of gradients and optimizer state that do not exist yet, and what FSDP gathers in a step."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    held = [local(p) for p in parameters]
    gradients = sum(own.nbytes for p, own in zip(parameters, held, strict=True) if p.grad is None)
    if run.is_fsdp2:
        gradients += gathered_bytes(run.model, (run.compute_dtype or torch.float32).itemsize)
        if run.args.gradient_accumulation_steps > 1:  # parted only at the end of the step
            gradients += sum(4 * p.numel() for p in parameters)
    optimizer = run.trainer.optimizer
    if optimizer is not None and getattr(optimizer, "state", None):
        return gradients
    name = str(run.args.optim).lower()
    per_weight = 2 if "8bit" in name else 0 if "paged" in name or "sgd" in name or "adafactor" in name else None
    state = sum(own.numel() * (2 * own.element_size() if per_weight is None else per_weight) for own in held)
    return gradients + state


def budget_bytes(run: Run, say: Callable[[str], None]) -> int:
    """Return the bytes for activations in this process: the budget that was asked for, at most what is free."""
    asked, device = run.settings.activation_memory_gib, run.device
    if device.type == "cuda":
        free = allocatable(device)
    else:
        free = psutil.virtual_memory().available
    there = max(0, int((free - memory_to_come(run)) * MARGIN))
    if asked is not None and asked * GIB > there:
        say(f"activation_memory_gib={asked:g} is more than the {there / GIB:.1f} GiB that are free: planned for those")
    return int(there if asked is None else min(there, asked * GIB))


def offload_options(run: Run) -> dict[str, Any]:
    """Return the arguments of `offload_checkpoints` for layers at the level ``offload``."""
    return {
        "mode": "single_buffer" if run.settings.checkpoint_offload == "single_buffer" else "double_buffer",
        "offload_budget_gib": run.settings.offload_budget_gib,
    }


def plan_memory(run: Run) -> ActivationMemory:
    """Trace the model and choose its levels; each fallback is said.

    Raises:
        LevelError: the level that was asked for cannot be used.
        ValueError: rows of any length.
        RuntimeError: the decoder cannot be run by itself, or another process cannot plan.
    """
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        logger.warning(f"{FEATURE}: {message}")

    setting, offload = run.settings.activation_memory, offload_options(run)
    device, layers = run.device, checkpointable_layers(run.model)
    cuda = device.type == "cuda"
    with run.ranks.together():  # none may run a parted model without the others
        tokens, longest = largest_row(run)
        blocked = "" if "streams" in offload else offload_unavailable(device)
        copies = (host_copy_seconds(device) if cuda else lambda count: 0.0) if not blocked else None
        hidden = text_model(run.model).config.get_text_config().hidden_size
        decode, own = decoder_run(run), float(budget_bytes(run, say))
    (least,) = run.ranks.least([own])
    head_bytes = tokens * hidden * _HEAD_BYTES
    budget = max(0, int(least) - head_bytes)
    # All processes run the parted model together: none of them may take a pass more for what its clock says.
    timed = min(tokens, TIMED_TOKENS) if cuda and not run.is_fsdp2 else None
    # A compiled layer decides by itself which element-wise work it does again, and hides its products.
    compiles = run.settings.layer_compile
    compiled = compiles == "on" or (compiles == "auto" and cuda)
    levels = [level for level in Level if not (compiled and level is Level.POINTWISE)]

    def ample(kept: Sequence[Growth]) -> bool:
        enough = setting == "auto" and sum(growth.at(tokens, longest) for growth in kept) * AMPLE <= budget
        return run.ranks.all(enough) if run.is_fsdp2 else enough

    costs, failed = trace_levels(
        run.model, layers, decode, timed_tokens=timed, copy_seconds=copies, levels=levels, room=budget,
        ample=ample, together=run.together_if_parted,
    )  # fmt: skip
    deepest = Level.OFFLOAD if not blocked else Level.CHECKPOINT
    sizes = {"tokens": tokens, "longest": longest}
    if setting == "auto":
        plan = choose_levels(costs, budget=budget, deepest=deepest, **sizes)
        if not plan.fits:
            say(f"nothing fits the budget: {plan}")
    else:
        level = LEVEL_OF[setting]
        if level not in costs.growth:
            raise LevelError(failed.get(level) or blocked or failed[Level.CHECKPOINT])
        plan = make_plan(costs, [level] * len(layers), budget=budget, **sizes)

    def less(plan: Plan) -> Plan | None:
        return deeper(costs, plan, deepest=deepest, **sizes)

    def at(levels: Sequence[Level]) -> Plan:
        return make_plan(costs, levels, budget=budget, **sizes)

    return ActivationMemory(run, layers, plan, less, at, offload, said, setting != "auto", head_bytes)
