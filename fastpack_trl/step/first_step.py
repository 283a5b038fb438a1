"""The time from the start of `train` to the end of its first optimizer step, and what of it is spent once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from fastpack_trl.run import Run

FACT = "first step"


class FirstStep(TrainerCallback):
    """Writes ``first step: 14.8 s (compile 12.9 s, proof 0.4 s, plan 0.6 s)`` among the report's figures.

    Host time, since nothing waits for the device: on CUDA the last kernels of that step may still run. Compiling,
    proof and plan wait for the device themselves, so theirs are whole.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start: float | None = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._start is None:
            return
        seconds, self._start = time.perf_counter() - self._start, None
        parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in self._run.seconds.items() if taken >= 0.05)
        self._run.report.facts[FACT] = f"{seconds:.1f} s ({parts})" if parts else f"{seconds:.1f} s"


@contextmanager
def first_step(run: Run) -> Iterator[None]:
    """Time the start of training, from here on."""
    run.seconds.clear()
    run.report.facts.pop(FACT, None)  # of a run before: the banner says what is known
    watch = FirstStep(run)
    run.trainer.add_callback(watch)
    try:
        yield
    finally:
        run.trainer.remove_callback(watch)
