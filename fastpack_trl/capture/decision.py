"""Whether a run has CUDA graphs: only if the device waits for the host, and recording is paid back."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.capture.device import CudaGraphs, IdleWatch
from fastpack_trl.errors import close_frames, describe, first_cause
from fastpack_trl.measure.payback import StartUpCost
from fastpack_trl.run import Run

logger = get_logger(__name__)

FEATURE = "cuda_graph"
EAGER_STEPS = 2
"""Optimizer steps before anything is recorded: in the first, micro-batches run unmerged; in the second the optimizer
has its states, merged rows have their length, and layers are compiled."""
WATCHED_STEPS = 3
"""Settled steps in which the device is watched."""
LEAST_IDLE = 0.1
"""Share of these steps for which the device has to be idle. In 22 comparisons graphs saved 14 % of a step or more in
all but eight, which lay between -4 and 3 %: the device was idle for 75 % of a step at 0.6B, and for 2 % at 8B."""
WARM_ROWS = 1
"""Rows of a bucket that run eagerly in its static shapes: they load and tune kernels, which cannot be recorded. One
more if a recording fails after them."""
RECORD_SECONDS = 0.5
"""Assumed cost of recording; 0.1 to 0.2 s were measured on an H200."""
MAX_RERECORDINGS = 3
"""How often graphs are recorded again because the model was changed."""

Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]
"""A graph, and what its replays write."""


class GraphDecision(TrainerCallback, abc.ABC):
    """Decides whether graphs are recorded, and reports it; a subclass holds them.

    Args:
        run: whose trainer trains.
        device: records and replays.
        asked: ``cuda_graph="on"``: recording is not weighed.

    Attributes:
        warmed, recorded, replayed: numbers of rows that ran eagerly in static shapes, of recordings, and of replays.
    """

    def __init__(self, run: Run, device: CudaGraphs, *, asked: bool) -> None:
        self._run, self._device, self._asked = run, device, asked
        self._first_step: int | None = None
        self._present_step = -1
        self._pays = asked
        self._watch: IdleWatch | None = None
        self._watched: list[tuple[float, float]] = []
        self._note = ""
        self._ended = False
        self._changes = 0
        self.warmed = self.recorded = self.replayed = 0

    @abc.abstractmethod
    def drop(self) -> None:
        """Drop all graphs and buckets; they are made again from the rows that follow."""

    @property
    @abc.abstractmethod
    def graphs(self) -> int:
        """Number of graphs."""

    @property
    def _is_settled(self) -> bool:
        return self._steps_done >= EAGER_STEPS and self._run.step.is_warmed_up

    def _begins_step(self) -> bool:
        """Return whether this is the first forward pass of an optimizer step; watch the device from there on."""
        step = self._run.trainer.state.global_step
        if step == self._present_step:
            return False
        self._present_step = step
        if self._is_settled and not self._pays and self._watch is None:
            self._watch = self._device.watch_idle()
        return True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide once the backward passes of enough steps are launched."""
        if self._watch is None:
            return
        self._watched.append(self._watch.stop())
        self._watch = None
        if len(self._watched) == WATCHED_STEPS and not self._ended:
            self._weigh()

    def _weigh(self) -> None:
        seconds = sum(seconds for _, seconds in self._watched)
        idle = sum(share * seconds for share, seconds in self._watched) / seconds
        self._note = f"the device was idle for {idle:.0%} of {len(self._watched)} eager steps"
        state = self._run.trainer.state
        steps_left, each = state.max_steps - state.global_step, seconds / len(self._watched)
        if idle < LEAST_IDLE:
            self.disable(f"{self._note}: graphs pay off from {LEAST_IDLE:.0%} on")
        elif not StartUpCost(RECORD_SECONDS, idle * each).pays(steps_left):
            self.disable(f"{steps_left} steps of {each * 1e3:.0f} ms are left: recording would not be paid back")
        else:
            self._pays = True

    @property
    def has_ended(self) -> bool:
        """Whether all that follows runs eagerly."""
        return self._ended

    @property
    def _steps_done(self) -> int:
        done = self._run.trainer.state.global_step
        if self._first_step is None:
            self._first_step = done  # not 0 if a run was resumed
        return done - self._first_step

    def disable(self, reason: str) -> None:
        """Run all that follows eagerly; reported once."""
        if not self._ended:
            self._ended = True
            self._run.disable(FEATURE, "eager", reason)
        self.drop()

    def reclaim(self) -> bool:
        """Free the memory of the graphs after a step ran out of it; False if there are none."""
        held = self.graphs > 0
        if held:
            self.disable("a step ran out of memory beside the graphs")
        return held

    def finish(self) -> None:
        """Report the run, and drop the graphs."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.recorded and not self._ended:
            self._tell()
        elif not self._ended:
            why = f"no row was recorded in {self._steps_done} steps"
            if self._asked:
                self._run.disable(FEATURE, "eager", why)
            else:
                self._run.set_status(FEATURE, "off", "eager", why)
        self.drop()

    @abc.abstractmethod
    def _describe_rows(self) -> str:
        """Return how well rows fit into the recorded shapes."""

    def _tell(self) -> None:
        """Report what there is."""
        held = self._device.bytes_held()
        notes = [self._note] if self._note else []
        notes.append(f"{self.graphs} graph{'s' * (self.graphs != 1)} of {held / 2**30:.2f} GiB")
        notes.append(self._describe_rows())
        self._run.set_status(FEATURE, "on", "captured", "; ".join(notes))

    def _try_record(self, work: Callable[[], tuple[Tensor, ...]], warm_rows: int, pool: str) -> Recording | None:
        """Record `work`; return None if that fails, and end the feature if it fails for the second time.

        Args:
            work: returns the tensors that a replay writes.
            warm_rows: rows that ran eagerly in the same shapes.
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
            if warm_rows > WARM_ROWS:  # the same rows ran eagerly in these shapes: recording is what fails
                self.disable(f"a micro-step cannot be recorded: {describe(first_cause(error))}")
        return None

    def _model_changed(self) -> None:
        """Drop the recordings of a model that has changed since."""
        self._changes += 1
        if self._changes > MAX_RERECORDINGS:
            self.disable("the model is changed again and again (weights moved, frozen or merged, modes)")
        else:
            self.drop()
