"""Training steps of a trainer outside of its `train`, marked in time after each phase, and those of several in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from trl import SFTTrainer

from benchmarks.cases import loaded_turns
from fastpack_trl import FastSFTTrainer
from fastpack_trl.checkpointing.activation_memory import ActivationMemory
from fastpack_trl.measure.device_memory import PeakMemory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.measure.rounds import Rounds
from fastpack_trl.measure.timing import Clock, CudaClock

F = TypeVar("F", bound=Callable[..., Any])
PHASES = ("data", "forward", "backward", "optimizer")


def instrument(function: F) -> F:
    """Make a hook or a method count as the package's own.

    A trainer asks where the methods and hooks on it come from (`fastpack_trl.model.hooks`), and runs the slower
    path that stock has where one is the user's: the path to be timed would be another one.
    """
    function.__module__ = "fastpack_trl.bench"
    return function


@dataclass(frozen=True, slots=True)
class Step:
    """Marks, loss and tokens of one training step."""

    marks: tuple[Any, ...]
    """Start, then the end of each of `PHASES`, in the clock's unit."""
    loss: torch.Tensor
    input_ids: torch.Tensor
    documents: int
    seq_lengths: tuple[int, ...] = ()
    """Tokens of each document, where the batch says so on the host."""
    allocated: tuple[int, ...] = ()
    """Bytes of device memory at each of the marks; empty on the CPU."""


class SteppedTrainer:
    """One trainer, prepared as its `train` prepares it, advanced step by step."""

    def __init__(self, trainer: SFTTrainer, clock: Clock, steps: int) -> None:
        self.trainer = trainer
        self.clock = clock
        args = trainer.args
        if args.gradient_checkpointing:  # `train` switches it on
            model: Any = trainer.model
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(args.gradient_checkpointing_kwargs)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ActivationMemory):  # installs its plan when `train` has switched that on
                callback.on_train_begin(args, trainer.state, trainer.control)
        if isinstance(trainer, FastSFTTrainer):  # no loop ends a step here, and `auto` weighs those that are left
            trainer.state.max_steps, trainer.fastpack_run.step.in_first = LONG_RUN, False
        trainer.create_optimizer()
        self.model, self.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.optimizer = self.optimizer
        trainer.create_scheduler(num_training_steps=steps)
        trainer.current_gradient_accumulation_steps = 1
        self.batches = iter(trainer.get_train_dataloader())
        self._forward_end: Any = None
        self._allocated: list[int] = []
        self._compute_loss: Callable[..., Any] = trainer.compute_loss
        trainer.compute_loss = self._marked_compute_loss

    @instrument
    def _marked_compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._compute_loss(*args, **kwargs)
        self._forward_end = self._mark()
        return loss

    def _mark(self) -> Any:
        # The allocator's own count: nothing waits for the device.
        if isinstance(self.clock, CudaClock):
            self._allocated.append(torch.cuda.memory_allocated())
        return self.clock.mark()

    def fetch(self) -> tuple[Any, Any]:
        """Return the next batch as `train` gets it: a list of one, and the number of its labels."""
        return self.trainer.get_batch_samples(self.batches, 1, self.trainer.args.device)

    def step(self) -> Step:
        """Run the next batch through forward, backward, clipping and the optimizer."""
        trainer, mark = self.trainer, self._mark
        self._allocated = []
        marks = [mark()]
        (inputs,), items = self.fetch()
        marks.append(mark())
        input_ids, packed = inputs["input_ids"], inputs.get("packed_batch")
        lengths = () if packed is None else packed.seq_lengths
        documents = len(lengths) if lengths else len(inputs["cu_seq_lens_q"]) - 1
        loss = trainer.training_step(self.model, inputs, items)
        marks += [self._forward_end, mark()]
        trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        self.optimizer.step()
        trainer.lr_scheduler.step()
        self.model.zero_grad()
        marks.append(mark())
        return Step(tuple(marks), loss, input_ids, documents, lengths, tuple(self._allocated))


def side_figures(seconds: Sequence[float], steps: Sequence[Step], clock: Clock) -> dict[str, Any]:
    """Return one side's part of a row: seconds, tokens per second, phases (medians and every value) and losses.

    ``memory_marks`` is of the last step: milliseconds since its start and bytes allocated, at the end of each phase.
    """
    rates = [step.input_ids.numel() / taken for step, taken in zip(steps, seconds, strict=True)]
    parts = {
        phase: [clock.seconds(step.marks[index], step.marks[index + 1]) for step in steps]
        for index, phase in enumerate(PHASES)
    }
    last = steps[-1]
    memory = [
        [clock.seconds(last.marks[0], mark) * 1000, used]
        for mark, used in zip(last.marks, last.allocated, strict=bool(last.allocated))
    ]
    return {
        "seconds": summary(seconds),
        "tokens_per_second": median_interval(rates).to_dict(),
        "phases": {phase: median(values) for phase, values in parts.items()},
        "phase_values": parts,
        "losses": [float(step.loss) for step in steps],
        **({"memory_marks": memory} if memory else {}),
    }


def document_tokens(steps: Sequence[Step]) -> dict[str, float] | None:
    """Return the shortest, median and longest document of the steps, in tokens; None where their batches do not say."""
    lengths = [length for step in steps for length in step.seq_lengths]
    return {"shortest": min(lengths), "median": median(lengths), "longest": max(lengths)} if lengths else None


@dataclass(frozen=True, slots=True)
class SideTurns:
    """The steps of `measure_in_turns`.

    Attributes:
        sides: those that could be made, by name.
        found: their steps with what each took of memory, and their seconds.
        failed: the reason of each side that could not be made or broke off.
        other_load: cores that other processes kept busy.
    """

    sides: dict[str, SteppedTrainer]
    found: Rounds[tuple[Step, Any]]
    failed: dict[str, str]
    other_load: float | None


def measure_in_turns(
    names: Sequence[str], make: Callable[[str, SteppedTrainer | None], SteppedTrainer], *, weights: nn.Module,
    device: str, **options: Any,
) -> SideTurns:  # fmt: skip
    """Make trainers and time their steps in turn; all of them train `weights`.

    Args:
        names: of the sides.
        make: the side of a name, given the first one, whose optimizer it is to use.
        weights: the module whose gradients are dropped when a side fails: a backward that broke off leaves some.
        device: ``cpu`` or ``cuda``.
        options: of `take_turns`.
    """
    sides: dict[str, SteppedTrainer] = {}
    failed: dict[str, str] = {}
    for name in names:
        side, failure = attempt(partial(make, name, next(iter(sides.values()), None)))
        if side is None:
            failed[name] = failure or ""
        else:
            sides[name] = side
    calls = {name: partial(_step, side, device) for name, side in sides.items()}
    found, load = loaded_turns(calls, device, dropped=weights.zero_grad, **options)
    return SideTurns(sides, found, failed | found.failed, load)


def largest_memory(steps: Sequence[tuple[Any, Any]]) -> dict[str, int] | None:
    """Return the memory of the step with the highest peak, of steps with their `PeakMemory.read`; None on the CPU."""
    memory: list[dict[str, int]] = [used for _, used in steps if used is not None]
    return max(memory, key=lambda used: used["peak_bytes"]) if memory else None


def _step(side: SteppedTrainer, device: str) -> tuple[Step, Any]:
    memory = PeakMemory(device)
    return side.step(), memory.read()
