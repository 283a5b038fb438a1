"""Micro-batches of an optimizer step as fewer, longer rows, with fewer launches.

The trainer's loop stays as it is. It is given all micro-batches and calls a step for each; those before the last of a
group return a loss of zero without running, the last runs the group as one row and returns the sum of their losses.
So steps, callbacks, token and FLOP counts go on per micro-batch (`fastpack_trl.model.hooks` finds those that could
tell), and under DDP the group that ends the accumulation is the one that reduces the gradients. The NaN filter of the
logged loss looks at the group as one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger

from fastpack_trl.errors import first_reason
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.facts import ALORA, is_invoked_once_per_row
from fastpack_trl.model.hooks import (
    HookWatch,
    callback_between,
    ends_early,
    hook_on_a_gradient,
    needs_logits,
    trained_parameters,
)
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


class Merging:
    """Decides per optimizer step which micro-batches run as one row.

    On CUDA the first step runs unmerged. Each of its micro-batches but the first, which makes the gradients, gives an
    upper bound of the bytes per token: the peak so far less what was allocated before it. The lowest bound is taken.

    Attributes:
        target: tokens of a row above which nothing more is added; infinite for as many as fit.
        measures: the first step is measured.
        fits: tokens of a row that fit into memory by prediction; None before it is measured.
    """

    def __init__(self, run: Run, target: float) -> None:
        self.target = target
        self.measures = run.device.type == "cuda"
        self.fits = None if self.measures else math.inf
        self._run, self._bytes_per_token = run, math.inf
        self._ended = self._all_looked_at = False
        self._module_hooks: HookWatch | None = None
        self._step: list[Any] = []
        self._groups: dict[int, range] = {}
        """By the place of the last micro-batch of each group."""

    def plan(self, batches: list[Any]) -> None:
        """Choose the groups of one optimizer step."""
        self._step, self._groups = batches, {}
        if self.fits is None and self._bytes_per_token < math.inf:
            # At the beginning of a step optimizer states are there, gradients are not.
            gradients = sum(p.nbytes for p in self._run.model.parameters() if p.requires_grad)
            free = allocatable(self._run.device) - gradients
            self.fits = max(0.0, _MEMORY_SHARE * free / self._bytes_per_token)
        if self._ended or len(batches) < 2 or self.fits is None:
            return
        if not all(map(can_merge, batches)):
            self._run.report.remark(FEATURE, "micro-batches changed after collation run one by one")
            return
        tokens = [sum(batch["packed_batch"].seq_lengths) for batch in batches]
        self._groups = {group[-1]: group for group in group_by_tokens(tokens, min(self.target, self.fits))}

    @property
    def rows(self) -> int:
        """Return the rows that the micro-batches of the step run as."""
        return len(self._groups) or len(self._step)

    def group(self, place: int) -> range:
        """Return the places of the micro-batches that run with that at `place`; none if it waits for the last one."""
        if self._groups and place == 0:
            self._look_for_watchers()  # callbacks have begun the step
            if ends_early(self._run.trainer):
                self._groups = {}
        return self._groups.get(place, range(0)) if self._groups else range(place, place + 1)

    @contextlib.contextmanager
    def measured(self, place: int, inputs: Any) -> Iterator[None]:
        """Measure in the first step what a micro-batch takes, but for that of the first, which makes the gradients."""
        tokens, device = inputs["input_ids"].numel() if "input_ids" in inputs else 0, self._run.device
        if self.fits is not None or not tokens or not place:
            yield
            return
        before = torch.cuda.memory_allocated(device)
        yield
        taken = torch.cuda.max_memory_allocated(device) - before
        self._bytes_per_token = min(self._bytes_per_token, taken / tokens)

    def _look_for_watchers(self) -> None:
        """Merge no more in this run if a callback, a hook or a loss came that needs single micro-batches."""
        trainer = self._run.trainer
        parameters = trained_parameters(trainer.optimizer) if self._all_looked_at else trainer.model.parameters()
        self._all_looked_at = True
        self._module_hooks = self._module_hooks or HookWatch(trainer.model_wrapped)  # wrapped by now
        reasons = (
            is_invoked_once_per_row(trainer.model) and ALORA,  # an adapter that a callback added
            callback_between(trainer),
            hook_on_a_gradient(trainer.model, parameters),
            (hook := self._module_hooks.look()) and f"{hook} runs once per micro-batch",
            needs_logits(trainer),
        )
        if reason := first_reason(reasons):
            self._run.disable(FEATURE, "stock", reason)
            self._ended, self._groups = True, {}

    def split(self, group: range) -> None:
        """Halve rows after an out-of-memory, with a warning; the rest of the step runs one by one."""
        own = [sum(self._step[place]["packed_batch"].seq_lengths) for place in group]
        self.target, self._groups = sum(own) // 2, {}
        after = f"rows of at most {self.target:,} tokens from the next step on"
        reason = f"out of memory in a merged row of {sum(own):,} tokens: {after}"
        logger.warning(f"merge_accumulation: {reason}")
        self._run.set_status(FEATURE, "on", "split again", reason)
