"""Whether a run has CUDA graphs: weighed before any is recorded, compared in turn with eager steps, given back."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.capture.buckets import RowBuckets
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.times import LEAST_PAIRS, StepTurns, least_gain
from fastpack_trl.errors import close_frames, describe, first_cause
from fastpack_trl.measure.payback import StartUpCost
from fastpack_trl.run import Run

logger = get_logger(__name__)

FEATURE = "cuda_graph"
EAGER_STEPS = 2
"""Optimizer steps before anything is recorded: in the first, micro-batches run unmerged; in the second the optimizer
has its states, merged rows have their length, and layers are compiled."""
WARM_ROWS = 1
"""Rows of a bucket that run eager in its static shapes: they load and tune kernels, which cannot be recorded. One more
where a recording fails after them."""
RECORD_SECONDS = 0.5
"""What recording is taken to cost before it is known; 0.1 to 0.2 s were measured on an H200."""
MOST_SAVED = 0.8
"""Share of a step that graphs are taken to save at most, before it is known."""
COMPARE_AGAIN = 100
"""Steps after which kept graphs are compared once more: the run has settled by then."""
MOST_CHANGES = 3
"""How often graphs are made anew because the model was changed."""


Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]
"""A graph, and what its replays write."""


class GraphDecision(TrainerCallback, abc.ABC):
    """Decides from step to step whether graphs are recorded and kept, and says so; what they hold is a subclass's.

    Args:
        run: whose trainer trains.
        device: records and replays.
        asked: recording was asked for by name: it is neither timed nor weighed against the steps that are left.

    Attributes:
        warmed, recorded, replayed: rows that ran eager in static shapes, recordings, and replays of the run so far.
    """

    def __init__(self, run: Run, device: CudaGraphs, *, asked: bool) -> None:
        self._run, self._device, self._asked = run, device, asked
        self._first_step: int | None = None
        self._turns = None if asked else StepTurns(device, apart=run.ranks.count > 1)
        self._pays = asked  # to record, as far as it is known before; then `_turns` compares
        self._kept = False
        self._again: int | None = None
        self._note = ""
        self._ended = False
        self._changes = 0
        self.warmed = self.recorded = self.replayed = self._left_out = 0
        self._buckets = RowBuckets(run)

    @abc.abstractmethod
    def drop(self) -> None:
        """Drop all graphs and buckets; they are made again from the rows that follow."""

    @property
    @abc.abstractmethod
    def graphs(self) -> int:
        """Graphs that are there."""

    def _begin_step(self) -> None:
        """At the first micro-batch of an optimizer step: callbacks ran since the last, the device has come further."""
        turns = self._turns
        if turns is None or not self._run.step.is_warmed_up or self._steps_done < EAGER_STEPS:
            return
        if self._again is not None and self._steps_done >= self._again and self.replayed:
            self._again = None
            if self._steps_left > COMPARE_AGAIN:
                turns.compare()
        if self._pays and not turns.compares:
            return
        turns.begin(self.replayed, self._prepared)
        if turns.compares:
            self._judge(turns)
        else:
            self._weigh(turns)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a step out of the comparison, whose time has an evaluation in it, or a checkpoint that was saved."""
        if self._turns is not None:
            self._turns.interrupt()

    on_save = on_evaluate

    def _weigh(self, turns: StepTurns) -> None:
        """Decide whether to record at all, once eager steps are known."""
        seconds, steps_left = turns.eager(), self._steps_left
        if seconds is None:  # the device has not come that far
            return
        self._pays = StartUpCost(RECORD_SECONDS, MOST_SAVED * seconds).pays(steps_left)
        if not self._pays:
            self.disable(f"{steps_left} steps of {seconds * 1e3:.0f} ms are left: recording would not be paid back")

    def _judge(self, turns: StepTurns) -> None:
        """Keep graphs that pay, as soon as enough steps are known; give the others back."""
        least = least_gain(self._device.bytes_held(), self._device.bytes_free())
        verdict = turns.verdict(least)
        if verdict is None:
            return
        turns.compares = False
        self._note = str(verdict)
        if verdict.pays:
            if not self._kept:
                self._again = self._steps_done + COMPARE_AGAIN
            self._kept = True
            self._tell()
        elif verdict.pairs < LEAST_PAIRS:
            self.disable("too few rows fit into a recorded size to compare steps")
        else:
            self.disable(f"graphs save less than {least:.0%} of a step, or no more than its noise: {self._note}")

    @property
    def _prepared(self) -> int:
        """Rows that ran in static shapes to be recorded, or fit no bucket, and recordings."""
        return self.warmed + self.recorded + self._left_out

    @property
    def _is_eager_turn(self) -> bool:
        return self._turns is not None and self._turns.is_eager

    @property
    def _steps_left(self) -> int:
        state = self._run.trainer.state
        return int(state.max_steps - state.global_step)

    @property
    def has_ended(self) -> bool:
        """Whether all that follows runs eager."""
        return self._ended

    @property
    def _steps_done(self) -> int:
        done = self._run.trainer.state.global_step
        if self._first_step is None:
            self._first_step = done  # not 0 where a run was resumed
        return done - self._first_step

    def disable(self, reason: str) -> None:
        """Run all that follows eager, said once."""
        if not self._ended:
            self._ended = True
            self._run.disable(FEATURE, "eager", reason)
        self.drop()

    def reclaim(self) -> bool:
        """Give the memory of the graphs back after a step ran out of it; False where there is none."""
        held = self.graphs > 0
        if held:
            self.disable("a step ran out of memory beside the graphs")
        return held

    def finish(self) -> None:
        """Say what the run came to, and drop the graphs."""
        if self.recorded and not self._ended:
            self._tell()
        elif not self._ended:
            why = f"no row was recorded in {self._steps_done} steps"
            if self._asked:
                self._run.disable(FEATURE, "eager", why)
            else:
                self._run.set_status(FEATURE, "off", "eager", why)
        self.drop()

    def _tell(self) -> None:
        held = self._device.bytes_held()
        said = [self._note] if self._note else []
        said.append(f"{self.graphs} graph{'s' * (self.graphs != 1)} of {held / 2**30:.2f} GiB")
        said.append(str(self._buckets))
        self._run.set_status(FEATURE, "on", "captured", "; ".join(said))

    def _recorded(self, work: Callable[[], tuple[Tensor, ...]], warm_rows: int, pool: str = "") -> Recording | None:
        """Record `work`; where that fails for the second time it is said why graphs end, and None returned.

        Args:
            work: returns the tensors that a replay writes.
            warm_rows: that ran eager in the same shapes.
            pool: see `CudaGraphs.record`.
        """
        try:
            return self._device.record(work, pool)
        except torch.OutOfMemoryError as error:
            close_frames(error)
            self.disable("no memory for the graph of a micro-step beside what eager ones need")
        except Exception as error:
            logger.debug(f"{FEATURE}: {error}", exc_info=True)
            close_frames(error)
            if warm_rows > WARM_ROWS:  # the same rows ran eager in these shapes: recording them is what fails
                self.disable(f"a micro-step cannot be recorded: {describe(first_cause(error))}")
        return None

    def _was_recorded(self) -> None:
        """Begin to compare, where graphs are not asked for, and say what there is."""
        if self._ended:
            return
        if self._turns is not None and not self._kept and not self._turns.compares:
            self._turns.compare()
        self._tell()

    def _model_changed(self) -> None:
        """Drop what was recorded of a model that is another now."""
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self.disable("the model is changed again and again (weights moved, frozen or merged, modes)")
        else:
            self.drop()
