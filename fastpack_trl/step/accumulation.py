"""Micro-batches of one optimizer step merged into fewer, longer rows: one launch of each kernel instead of many.

The trainer's loop stays as it is. It is given all micro-batches and calls a step for each; those before the last of a
group return a loss of zero without running, the last runs the group as one row and returns the sum of their losses.
So steps, callbacks, token and FLOP counts go on per micro-batch (`fastpack_trl.model.hooks` finds those that could
tell), and under DDP the group that ends the accumulation is the one that reduces the gradients. The NaN filter of the
logged loss looks at the group as one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import SFTTrainer

from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.facts import ALORA, is_invoked_once_per_row
from fastpack_trl.model.hooks import (
    HookWatch,
    callback_between,
    hook_on_a_gradient,
    needs_logits,
    trained_parameters,
)
from fastpack_trl.model.sharded import local
from fastpack_trl.packing.packed_batch import PackedBatch, merge_batches, to_transformers_kwargs
from fastpack_trl.packing.packed_inputs import PackedInputs
from fastpack_trl.run import Run

logger = get_logger(__name__)

FEATURE = "merge_accumulation"
_MEMORY_SHARE = 0.7
"""Of the free device memory that a merged row may fill by prediction; the rest is for fragments and longer rows."""


def merge_inputs(inputs: Sequence[Any]) -> PackedInputs:
    """Join the keywords of several rows into those of one (`merge_batches`); tokens and labels follow the documents."""
    batches = [one["packed_batch"] for one in inputs]
    tokens = [sum(batch.seq_lengths) for batch in batches]
    labelled = [sum(batch.documents.lengths if batch.documents else batch.seq_lengths) for batch in batches]
    flat = {
        name: torch.cat([one[name][:, :n] for one, n in zip(inputs, lengths, strict=True)], dim=1)
        for name, lengths in (("input_ids", tokens), ("labels", labelled))
    }
    batch = merge_batches(batches, flat["labels"])
    return PackedInputs(flat | to_transformers_kwargs(batch) | {"packed_batch": batch})


def can_merge(inputs: Any) -> bool:
    """Return whether a micro-batch is one packed row as collated, with no further keyword; its tokens may be others."""
    batch = inputs.get("packed_batch")
    if not isinstance(batch, PackedBatch) or batch.parts:
        return False
    if inputs.keys() != {"input_ids", "labels", "packed_batch", *to_transformers_kwargs(batch)}:
        return False
    return batch.counts(inputs["labels"]) and batch.describes(inputs["input_ids"], inputs["position_ids"])


def group_by_tokens(tokens: Sequence[int], limit: float) -> list[range]:
    """Group neighbours while they are at most `limit` tokens: ``(512, 512, 900, 300), 1024`` -> 0-1, 2, 3."""
    groups: list[range] = []
    start = total = 0
    for place, count in enumerate(tokens):
        if place > start and total + count > limit:
            groups.append(range(start, place))
            start, total = place, 0
        total += count
    return [*groups, range(start, len(tokens))] if tokens else []


def longest_row(run: Run) -> float:
    """Return the tokens that a micro-batch has at most; infinite where rows may have any length."""
    longest = run.args.max_length
    if not run.args.packing and run.facts is not None and run.facts.longest:
        longest = min(longest or math.inf, run.facts.longest)
    return math.inf if longest is None else float(run.args.per_device_train_batch_size * longest)


class MemoryLimit:
    """Tokens of a row that fit into the memory of a CUDA device, predicted from the first optimizer step.

    That step runs unmerged. Each of its micro-batches but the first, which makes the gradients, gives an upper bound of
    the bytes per token: the peak so far less what was allocated before it. The lowest bound is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_per_token = math.inf
        self.tokens: float | None = None
        """The prediction; None until `predict`."""

    @contextlib.contextmanager
    def observed(self, tokens: int) -> Iterator[None]:
        """Note what a micro-batch of `tokens` tokens takes in the context."""
        before = torch.cuda.memory_allocated(self.device)
        yield
        taken = torch.cuda.max_memory_allocated(self.device) - before
        self.bytes_per_token = min(self.bytes_per_token, taken / tokens)

    def predict(self, trainer: SFTTrainer) -> None:
        """Set `tokens`, at the beginning of a step: optimizer states are there, gradients are not. All ranks agree."""
        free = allocatable(self.device)
        free -= sum(local(p).nbytes for p in trainer.model.parameters() if p.requires_grad)
        tokens = max(0.0, _MEMORY_SHARE * free / self.bytes_per_token)
        if trainer.accelerator.num_processes > 1:
            tokens = float(trainer.accelerator.gather(torch.tensor([tokens], device=self.device)).min())
        self.tokens = tokens


class Merging:
    """Decides per optimizer step which micro-batches run as one row, and runs them.

    Args:
        run: whose trainer trains.
        target: tokens of a row above which nothing more is added; infinite for as many as fit.
    """

    def __init__(self, run: Run, target: float) -> None:
        self.target = target
        self._run, device = run, run.device
        self.memory = MemoryLimit(device) if device.type == "cuda" else None
        # FSDP gathers the parameters anew in each forward pass: all processes make as many. The token counts of their
        # micro-batches differ, so there a group is a number of micro-batches.
        self._in_step = run.is_fsdp2
        self._planned = self._ended = False
        self._all_looked_at = False
        self._module_hooks: HookWatch | None = None
        self._step: list[Any] = []
        self._groups: dict[int, range] = {}
        """By the identity of the last micro-batch of each group; the trainer keeps all of a step alive."""

    def plan(self, batches: list[Any], num_items_in_batch: Any) -> None:
        """Choose the groups of one optimizer step.

        Without the number of tokens of the whole step each loss is a mean over its micro-batch: they cannot be merged.
        """
        self._step, self._groups = batches, {}
        if self.memory is not None and self.memory.tokens is None and self._planned:
            self.memory.predict(self._run.trainer)
        self._planned = True
        fits = self.memory.tokens if self.memory is not None else math.inf
        if self._ended or len(batches) < 2 or num_items_in_batch is None or fits is None:
            return
        if not all(map(can_merge, batches)):
            self._run.report.remark(FEATURE, "micro-batches changed after collation run one by one")
            return
        limit = min(self.target, fits)
        if self._in_step:
            size = len(batches) if math.isinf(limit) else max(1, int(limit // longest_row(self._run)))
            groups = [range(at, min(at + size, len(batches))) for at in range(0, len(batches), size)]
        else:
            groups = group_by_tokens([sum(batch["packed_batch"].seq_lengths) for batch in batches], limit)
        for group in groups:
            self._groups[id(batches[group[-1]])] = group

    @property
    def rows(self) -> int:
        """Return the rows that the micro-batches of the step run as."""
        return len(self._groups) or len(self._step)

    def group(self, inputs: Any, place: int) -> range:
        """Return the places of the micro-batches that run now as one row; none for one that waits for the last of it.

        Args:
            inputs: of the present micro-batch.
            place: its own in the step.
        """
        is_first = bool(self._step) and inputs is self._step[0]
        if self._groups and is_first:
            self._look_for_watchers()  # callbacks have begun the step
        if self._in_step and is_first and not self._run.ranks.all(bool(self._groups)):
            self._groups = {}
        return self._groups.get(id(inputs), range(0)) if self._groups else range(place, place + 1)

    def measured(self, inputs: Any) -> AbstractContextManager[None]:
        """Measure in the first step what a micro-batch takes, but for that of the first, which makes the gradients."""
        memory, tokens = self.memory, inputs["input_ids"].numel() if "input_ids" in inputs else 0
        if memory is None or memory.tokens is not None or not tokens or not self._step or inputs is self._step[0]:
            return contextlib.nullcontext()
        return memory.observed(tokens)

    def _look_for_watchers(self) -> None:
        """Merge no more in this run if a callback, a hook or a loss came that needs single micro-batches."""
        trainer = self._run.trainer
        parameters = trained_parameters(trainer.optimizer) if self._all_looked_at else trainer.model.parameters()
        self._all_looked_at = True
        self._module_hooks = self._module_hooks or HookWatch(trainer.model_wrapped)  # wrapped by now
        reason = ALORA if is_invoked_once_per_row(trainer.model) else ""  # an adapter that a callback added
        reason = reason or callback_between(trainer) or hook_on_a_gradient(trainer.model, parameters)
        if not reason and (hook := self._module_hooks.look()):
            reason = f"{hook} runs once per micro-batch"
        reason = reason or needs_logits(trainer)
        if reason:
            self._run.disable(FEATURE, "stock", reason)
            self._ended, self._groups = True, {}

    def split(self, group: range) -> None:
        """Halve rows after an out-of-memory, with a warning; the rest of the step runs one by one."""
        own = [sum(self._step[place]["packed_batch"].seq_lengths) for place in group]
        self.target, self._groups = sum(own) // 2, {}
        merges = self.target >= min(map(sum, itertools.pairwise(own)))
        halved = f"rows of at most {self.target:,} tokens from the next step on"
        after = halved if merges else "micro-batches run one by one"
        reason = f"out of memory in a merged row of {sum(own):,} tokens: {after}"
        logger.warning(f"merge_accumulation: {reason}")
        self._run.set_status(FEATURE, "on", "split again", reason)
