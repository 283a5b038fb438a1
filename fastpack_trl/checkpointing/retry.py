"""A training step that runs out of memory is undone and run again with less of it."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.checkpointing.activation_memory import ActivationMemory
from fastpack_trl.errors import close_frames
from fastpack_trl.run import MicroStep, Run

_OF_SEVERAL = (
    "a step of several processes cannot be run again, the others wait inside of it: lower activation_memory_gib, "
    "per_device_train_batch_size or max_length, or set gradient_checkpointing=True"
)


class StepState:
    """State that one micro-batch changes before its optimizer step: gradients, random states, TRL's metrics.

    Made before the micro-batch; holds no copy of a gradient.
    """

    def __init__(self, run: Run) -> None:
        trainer = self._trainer = run.trainer
        parameters = run.model.parameters()
        self._gradients = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters if p.requires_grad]
        self._cpu = torch.get_rng_state()
        device = trainer.args.device
        self._device = device if device.type == "cuda" else None
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None
        # From `vars`: read as attributes these two settle the metrics, which waits for the device.
        self._metrics = {
            (mode, name): len(values)
            for mode, metrics in vars(trainer).get("_metrics", {}).items()
            for name, values in metrics.items()
        }
        self._tokens = vars(trainer).get("_total_train_tokens")
        self._back = run.step.rollback_point()
        self._complete: dict[Tensor, Tensor] = {}

    def undo(self) -> None:
        """Restore the state before the micro-batch, but for gradients that it has completed; those are set aside.

        Autograd adds to a gradient once per backward pass, all at once: one that changed has this micro-batch's whole
        share, and what a second pass would add to it is dropped by `finish`.
        """
        for parameter, gradient, version in self._gradients:
            if gradient is None or parameter in self._complete:
                parameter.grad = None
            elif parameter.grad is not gradient or gradient._version != version:
                assert parameter.grad is not None
                self._complete[parameter] = parameter.grad
                parameter.grad = None
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for mode, metrics in vars(self._trainer).get("_metrics", {}).items():
            for name, values in metrics.items():
                del values[self._metrics.get((mode, name), 0) :]
        if self._tokens is not None:
            self._trainer._total_train_tokens = self._tokens
        self._back()

    def finish(self) -> None:
        """Put the gradients that were complete before a successful pass in their place again."""
        for parameter, gradient in self._complete.items():
            parameter.grad = gradient


def run_again(run: Run, attempt: Callable[[], Tensor], less: Callable[[], bool]) -> Tensor:
    """Run a micro-batch; after an out-of-memory, undo it, free, and run it again. No batch is lost, no result changes.

    Args:
        run: whose micro-steps wait for no other process: another would wait for the gradients of the first attempt.
        attempt: the micro-batch, forward and backward.
        less: makes the next attempt need less memory; False where nothing is left to try.

    Raises:
        torch.OutOfMemoryError: of the attempt after which `less` found nothing.
    """
    state = StepState(run)
    while True:
        try:
            loss = attempt()
        except torch.OutOfMemoryError as error:
            close_frames(error)
            if not less():
                raise
        else:
            state.finish()
            return loss
        # The exception held the frames, and they the activations, of the attempt.
        state.undo()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def retry(run: Run, following: MicroStep, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
    """Undo a micro-batch that ran out of memory and run it again with less, where anything can be freed."""
    memory, trainer = run.get_state(ActivationMemory), run.trainer
    if not run.training:  # switched off as a whole
        return following(model, inputs, num_items_in_batch)
    merged = getattr(inputs.get("packed_batch"), "parts", None)
    if trainer.accelerator.num_processes > 1 and (merged or not run.step.reduces_apart):
        try:
            with memory.around_step() if memory is not None else contextlib.nullcontext():
                return following(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            error.add_note(f"rank {trainer.accelerator.process_index}: {_OF_SEVERAL}")
            raise
    # A merged row is split by what merged it.
    if (memory is None and not run.step.memory_reclaimers) or merged:
        return following(model, inputs, num_items_in_batch)
    less = run.step.reclaim_memory if memory is None else memory.go_deeper
    return run_again(run, lambda: following(model, copy.copy(inputs), num_items_in_batch), less)
