"""The callback that times a side of `benchmarks.side_by_side`, in this environment or in another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu_profile import profile_figures

WARMUP, LONGEST_WARMUP, TIMED, PROFILED = 6, 48, 12, 2
SETTLING = 6
"""Steps of the warm-up after all is decided: in the first ones graphs are made for rows of other lengths."""
LOGGED = 6
"""Steps between two logs; the others are multiples of it, so that tokens and losses are those of the timed steps."""
MOST = LONGEST_WARMUP + TIMED + PROFILED + 1
"""Steps of the longest run."""


class Watch(TrainerCallback):
    """Times the steps after the warm-up, then profiles some, and ends the run.

    Args:
        ready: returns whether all that pays back in a long run is decided; the warm-up lasts until then.
        profile: whether to profile.
        shapes: whether the profile has the shapes of operators' inputs.
    """

    def __init__(self, ready: Callable[[], bool], profile: bool, shapes: bool = False) -> None:
        self.seconds: list[float] = []
        self.warmup = 0
        self._decided_at: int | None = None
        self.events: list[Any] = []
        self._ready, self._profiles = ready, profile
        self._profiler = torch.profiler.profile(
            activities=list(torch.profiler.supported_activities()), record_shapes=shapes
        )
        self._last = 0.0

    @property
    def profile(self) -> dict[str, float]:
        """Return the figures of `profile_figures`; empty without a profile."""
        return profile_figures(self.events, PROFILED) if self.events else {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if not self.warmup:
            if self._decided_at is None and step >= WARMUP and self._ready():
                self._decided_at = step
            settled = self._decided_at is not None and step >= self._decided_at + SETTLING
            if step % LOGGED == 0 and (settled or step >= LONGEST_WARMUP):
                self.warmup = step
        elif len(self.seconds) < TIMED:
            self.seconds.append(now - self._last)
        if self.warmup and step == self.warmup + TIMED:
            if not self._profiles:
                control.should_training_stop = True
            else:
                self._profiler.start()
        if self.warmup and step == self.warmup + TIMED + PROFILED and self._profiles:
            self._profiler.stop()
            self.events = list(self._profiler.events() or ())
            control.should_training_stop = True
        self._last = time.perf_counter()


def figures_of(watch: Watch, log_history: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return what a run has measured: seconds, tokens without padding, losses by step, memory and profile.

    Args:
        watch: of the run.
        log_history: of the trainer's state; TRL logs ``num_tokens``.
        device: ``cpu`` or ``cuda``.
    """
    logs = {entry["step"]: entry for entry in log_history if "loss" in entry}
    first, last = logs[watch.warmup], logs[watch.warmup + TIMED]
    return {
        "step_seconds": watch.seconds, "timed_tokens": last["num_tokens"] - first["num_tokens"],
        "warmup_steps": watch.warmup, "profile": watch.profile,
        "losses": {str(step): entry["loss"] for step, entry in logs.items()},
        **peaks_gib(device),
    }  # fmt: skip


def peaks_gib(device: str) -> dict[str, float | None]:
    """Return the most that was allocated, and the most that torch held of the device: what a card must have.

    The memory of CUDA graphs counts as allocated only while they are recorded, but is held to the end.
    """
    read = {"peak_gib": torch.cuda.max_memory_allocated, "reserved_gib": torch.cuda.max_memory_reserved}
    return {name: call() / 2**30 if device == "cuda" else None for name, call in read.items()}
