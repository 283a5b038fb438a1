"""`StepServices`: values that the features of a run share during steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StepServices:
    """State of a run's steps, which changes from step to step.

    Attributes:
        version: grows whenever layers begin to run otherwise (compiled, kept, offloaded).
        rows: number of rows in the current step after merging; 0 before any.
        activations_left: bytes that the plan of the activations leaves of its budget, 0 if it recomputes a layer for
            want of memory; None without such a plan. Copies of frozen weights take of it, then CUDA graphs.
        activation_bytes: memory of the activations of a step by that plan: a CUDA graph holds as much once more.
        offloads: layer inputs go to host memory.
    """

    version: int = 0
    rows: int = 0
    activations_left: int | None = None
    activation_bytes: int = 0
    offloads: bool = False
    _waiting: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def is_warmed_up(self) -> bool:
        """Nothing is left that the first steps decide: what compiles, which rows are merged."""
        return not any(waits() for waits in self._waiting)

    @contextmanager
    def waiting_for(self, waits: Callable[[], bool]) -> Iterator[None]:
        """Count `waits` among the decisions of the first steps, until the context ends."""
        self._waiting.append(waits)
        try:
            yield
        finally:
            self._waiting.remove(waits)
