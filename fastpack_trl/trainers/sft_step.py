"""The micro-batches of one optimizer step of SFT, which run again together after an out-of-memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from torch import Tensor

from fastpack_trl.errors import close_frames, first_reason
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.model.hooks import callback_between, hook_on_a_gradient
from fastpack_trl.run import MicroStep, Run, steps_in_backward
from fastpack_trl.step.merging import merge_inputs
from fastpack_trl.step.metrics import DeferredMetrics

logger = get_logger(__name__)

_Result = TypeVar("_Result")
_LESS = "lower activation_memory_gib, per_device_train_batch_size or max_length, or set gradient_checkpointing=True"


class OptimizerStep:
    """Runs the micro-batches of an optimizer step, merged or one by one; after an out-of-memory all of them again.

    Before the step runs again, gradients are zeroed, and random state, metrics and token counts are restored, so no
    batch is lost and no result changes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.reset()

    def reset(self) -> None:
        """Begin a run: no micro-batch is done."""
        self._batches: list[Any] = []
        self._start: _Start | None = None
        self._done = self._step = self._before = 0

    def begin(self, batches: list[Any]) -> None:
        """Take the micro-batches that the trainer has read for a step, and plan their rows."""
        step = self._run.trainer.state.global_step
        # Micro-batches without an optimizer step: an epoch of a stream ended there, and their gradients remain.
        self._before, self._step = self._before + self._done if step == self._step else 0, step
        self._batches, self._done, self._start = batches, 0, None
        merging = self._run.merging
        if merging is not None:
            merging.plan(batches)
        if self._run.memory is not None:
            self._run.memory.plan_step(batches)

    def run(self, forward_backward: MicroStep, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Run a micro-batch, or the row that it completes; return the loss, 0 for one that waits for the last of it.

        Raises:
            torch.OutOfMemoryError: nothing is left that could be freed, or the step cannot run again.
        """
        merging, place = self._run.merging, self._done
        is_known = place < len(self._batches) and inputs is self._batches[place]
        self._done += 1
        group = range(place, place + 1) if merging is None or not is_known else merging.group(place)
        if not group:
            return torch.zeros((), device=self._run.device)
        if self._start is None:
            self._start = _Start(self._run)
        rows = [group]
        while True:
            losses = []
            try:
                for row in rows:
                    batches = [inputs if each == place else self._batches[each] for each in row]
                    one = merge_inputs(batches) if len(row) > 1 else batches[0]
                    try:
                        with nullcontext() if merging is None else merging.measured(place, one):
                            loss = forward_backward(model, copy.copy(one), num_items_in_batch)
                    finally:
                        clear_derived(one)
                        if len(row) > 1:
                            one.clear()
                    losses += [loss] if row[-1] in group else []
                return reduce(add, losses)
            except torch.OutOfMemoryError as error:
                close_frames(error)
                if why := self._why_not_again(is_known, len(rows[0]) > 1):
                    error.add_note(f"rank {self._run.trainer.accelerator.process_index}: {why}: {_LESS}")
                    raise
                if not self._free(rows[0]):
                    raise
            # Past the handler, whose exception keeps frames alive: all so far, one by one.
            model.zero_grad()
            free_memory()
            self._start.restore()
            rows = [range(each, each + 1) for each in range(group.stop)]

    def _why_not_again(self, is_known: bool, is_merged: bool) -> str:
        """Return why the step cannot run again after an out-of-memory; empty if it can."""
        trainer, flat = self._run.trainer, self._run.reduce
        if trainer.accelerator.num_processes > 1 and (is_merged or flat is None or not flat.is_on):
            return "a step of several processes cannot run again, because the others wait in it"
        if not is_known or self._start is None or self._start.is_over:
            return "the micro-batches or metrics of the step are not those that the trainer has read"
        reasons = (
            self._before > 0 and "gradients of micro-batches before it are still there",
            self._done > 1 and callback_between(trainer),
            steps_in_backward(trainer.args),
            hook_on_a_gradient(trainer.model, trainer.model.parameters()),
        )
        return f"the step cannot run again: {why}" if (why := first_reason(reasons)) else ""

    def _free(self, group: range) -> bool:
        """Make the next attempt need less memory; return whether anything was left to try."""
        run = self._run
        graphs, merging, memory = run.graphs, run.merging, run.memory
        if graphs is not None and graphs.reclaim():
            return True
        if len(group) > 1 and merging is not None:
            merging.split(group)
            return True
        if memory is not None and memory.go_deeper():
            return True
        assert self._start is not None
        first, self._start.has_emptied = not self._start.has_emptied, True
        if first:
            logger.warning("a step ran out of memory; it is run again with caches emptied")
        return first

    def run_evaluation(self, attempt: Callable[[], _Result]) -> _Result:
        """Run an evaluation batch; after an out-of-memory in one process once more, without graphs or cached blocks."""
        start = _Start(self._run)
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            close_frames(error)
            if self._run.trainer.accelerator.num_processes > 1 or start.is_over:
                raise
        if (graphs := self._run.graphs) is not None:
            graphs.reclaim()
        free_memory()
        start.restore()
        logger.warning("an evaluation batch ran out of memory; it is run again with caches emptied")
        return attempt()


class _Start:
    """Random state, metrics and token counts at the beginning of an optimizer step.

    Attributes:
        has_emptied: the step has run again with nothing but caches freed.
    """

    def __init__(self, run: Run) -> None:
        self._trainer, device, step = run.trainer, run.device, run.sync_free
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None
        # From `vars`: read as attributes they flush the deferred metrics, which waits for the device.
        self._lengths = {
            (mode, name): len(values)
            for mode, metrics in vars(self._trainer).get("_metrics", {}).items()
            for name, values in metrics.items()
        }
        self._tokens = vars(self._trainer).get("_total_train_tokens")
        self._deferred = DeferredMetrics() if step is None else step.metrics
        self._point = self._deferred.rollback_point()
        self.has_emptied = False

    @property
    def is_over(self) -> bool:
        """Whether metrics of the step are in TRL's lists already, because they were read during the step."""
        return self._deferred.is_past(self._point)

    def restore(self) -> None:
        """Put all of it back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for mode, metrics in vars(self._trainer).get("_metrics", {}).items():
            for name, values in metrics.items():
                del values[self._lengths.get((mode, name), 0) :]
        if self._tokens is not None:
            self._trainer._total_train_tokens = self._tokens
        self._deferred.rollback(self._point)


def clear_derived(inputs: Any) -> None:
    """Drop the objects derived from a batch."""
    batch = inputs.get("packed_batch")
    if batch is not None:
        batch.clear_derived()
