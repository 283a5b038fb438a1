"""The watch of one training run: times, memory and idle time of its steps, by a callback of the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers import TrainerCallback

from fastpack_trl.bench.profiles import profile_figures


class RunWatch(TrainerCallback):
    """Times the steps after a warm-up, profiles some behind them, and ends the run.

    ```python
    watch = RunWatch(warmup=6, timed=12, profiled=2, multiple=6)  # the trainer logs every 6 steps, of LONG_RUN
    trainer = SFTTrainer(..., callbacks=[watch])
    trainer.train()  # 6 + 12 + 2 steps
    watch.figures(trainer)
    ```

    Args:
        warmup: steps that are left out, at least; the first always is. The attribute: those that were, 0 until then.
        timed: steps after them.
        span: of these, steps between two points at which the host waits for the device; `seconds` has their mean.
        profiled: steps under torch.profiler after the timed ones; it is for a GPU, or asked for by `shapes`.
        shapes: whether the profile has the shapes of operators' inputs.
        ready: returns whether all that pays back in a long run is decided; the warm-up lasts until then.
        settling: steps of the warm-up after that: in the first ones graphs are made for rows of other lengths.
        longest_warmup: steps after which it ends in any case; default: none.
        multiple: the warm-up ends at a multiple of it, at which the trainer logs: the tokens are then of timed steps.
        marks: steps at whose ends the seconds since the begin are noted. The attribute: the seconds, by step.
        peaks_from: step from whose end on the memory is watched; 0: from the begin.
    """

    def __init__(
        self, *, warmup: int, timed: int, span: int = 1, profiled: int = 0, shapes: bool = False,
        ready: Callable[[], bool] = lambda: True, settling: int = 0, longest_warmup: float = float("inf"),
        multiple: int = 1, marks: Collection[int] = (), peaks_from: int = 0,
    ) -> None:  # fmt: skip
        self.seconds: list[float] = []
        self.first_step, self.marks = 0.0, dict.fromkeys(sorted(marks), 0.0)
        self.warmup, self.warmup_seconds = 0, 0.0
        self.events: list[Any] = []
        self._least, self._timed, self._span = warmup, timed, span
        self._profiled = profiled if torch.cuda.is_available() or shapes else 0
        self._ready, self._settling, self._longest, self._multiple = ready, settling, longest_warmup, multiple
        self._peaks_from = peaks_from
        self._decided_at: int | None = None
        self._profiler = torch.profiler.profile(
            activities=list(torch.profiler.supported_activities()), record_shapes=shapes
        )
        self._begin = self._last = 0.0

    def begin(self) -> None:
        """Start the clock, before ``train()``; without this call it starts at the run's first step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._begin = self._last = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        if not self._begin:
            self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time where it is asked for, go on with the profile, or end the run."""
        step = state.global_step
        in_span = bool(self.warmup) and (step - self.warmup) % self._span
        if in_span and step not in self.marks:
            if step == self.warmup + self._timed + self._profiled:
                self._end(control)
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._note(step, now)
        if not self.warmup:
            self._leave_out(step, now)
        elif step <= self.warmup + self._timed and not in_span:
            self.seconds.append((now - self._last) / self._span)
        if self.warmup and step == self.warmup + self._timed and self._profiled:
            self._profiler.start()
        elif self.warmup and step >= self.warmup + self._timed + self._profiled:
            self._end(control)
        if not in_span:
            self._last = time.perf_counter()

    def _note(self, step: int, now: float) -> None:
        if step == 1:
            self.first_step = now - self._begin
        if step in self.marks:
            self.marks[step] = now - self._begin
        if step == self._peaks_from and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _leave_out(self, step: int, now: float) -> None:
        """End the warm-up where all is decided and has settled."""
        if self._decided_at is None and step >= self._least and self._ready():
            self._decided_at = step
        settled = self._decided_at is not None and step >= self._decided_at + self._settling
        if step % self._multiple == 0 and (settled or step >= self._longest):
            self.warmup, self.warmup_seconds = step, now - self._begin

    def _end(self, control: Any) -> None:
        if self._profiled:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()
            self.events = list(self._profiler.events() or ())
        control.should_training_stop = True

    def figures(self, trainer: Any) -> dict[str, Any]:
        """Return what the run has measured, as plain data.

        Returns:
            ``step_seconds``, ``first_step_seconds``, ``warmup_steps``, ``warmup_seconds`` (from the begin),
            ``timed_tokens`` (without padding, by TRL's count; None where it has no log at one of their ends),
            ``losses`` by step, ``profile`` (`profile_figures`, empty without one), ``peak_gib`` and
            ``reserved_gib``, and ``report`` of a trainer of ours.
        """
        logs = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
        ends = [logs.get(step, {}).get("num_tokens") for step in (self.warmup, self.warmup + self._timed)]
        report = getattr(trainer, "fastpack_report", None)
        return {
            "step_seconds": self.seconds, "first_step_seconds": self.first_step, "warmup_steps": self.warmup,
            "warmup_seconds": self.warmup_seconds,
            "timed_tokens": None if None in ends else ends[1] - ends[0],
            "losses": {str(step): entry["loss"] for step, entry in logs.items()},
            "profile": profile_figures(self.events, self._profiled) if self.events else {},
            **peaks_gib(trainer.args.device.type), **({} if report is None else {"report": report.to_dict()}),
        }  # fmt: skip


def peaks_gib(device: str) -> dict[str, float | None]:
    """Return the most that was allocated, and the most that torch held of the device: what a card must have.

    The memory of CUDA graphs counts as allocated only while they are recorded, but is held to the end.
    """
    read = {"peak_gib": torch.cuda.max_memory_allocated, "reserved_gib": torch.cuda.max_memory_reserved}
    return {name: call() / 2**30 if device == "cuda" else None for name, call in read.items()}
