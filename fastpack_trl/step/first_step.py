"""The time from the start of `train` to the end of its first optimizer step, and what of it is spent once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from fastpack_trl.model.changes import callbacks_added
from fastpack_trl.run import Run

FACT = "first step"


class FirstStep(TrainerCallback):
    """Writes ``first step: 5.1 s (proof 1.0 s, plan 1.2 s); compile 9.3 s in the second`` among the report's figures.

    Host time, since nothing waits for the device: on CUDA the last kernels of that step may still run. Compiling,
    proof and plan wait for the device themselves, so theirs are whole.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start = time.perf_counter()
        self._known: set[str] = set()
        self._ended = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, facts = self._run, self._run.report.facts
        if self._ended:
            return
        self._ended = not run.step.in_first
        parts = {name: taken for name, taken in run.step.seconds.items() if taken >= 0.05 and name not in self._known}
        self._known |= parts.keys()
        said = ", ".join(f"{name} {taken:.1f} s" for name, taken in parts.items())
        if run.step.in_first:
            run.step.in_first = False
            seconds = time.perf_counter() - self._start
            facts[FACT] = f"{seconds:.1f} s ({said})" if said else f"{seconds:.1f} s"
        else:
            facts[FACT] += f"; {said} in the second" if said else ""


@contextmanager
def first_step(run: Run) -> Iterator[None]:
    """Time the start of training, from here on."""
    run.step.seconds.clear()
    run.step.in_first = True
    run.report.facts.pop(FACT, None)  # of a run before: the banner says what is known
    try:
        with callbacks_added(run.trainer, FirstStep(run)):
            yield
    finally:
        run.step.in_first = False
