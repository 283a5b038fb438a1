"""`StepServices`: what the features of a run do for each other while steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepServices:
    """Marks, memory, time and the state of a run's steps; all of it changes from step to step.

    Attributes:
        memory_reclaimers: free memory that is worth less than what any layer keeps, when a step ran out of it; each
            returns False where it has none.
        undo: called before a micro-batch that may run twice; what each returns takes the first attempt back.
        waiting: each says whether something is still to be decided in the first steps.
        version: grows whenever layers begin to run otherwise (compiled, kept, offloaded): see `layers_changed`.
        rows: that the micro-batches of the present step run as, merged or not; 0 before any.
        activations_left: bytes that the plan of the activations leaves of its budget, 0 where it has a layer recomputed
            for want of memory when training began; None without such a plan. Copies of frozen weights take of it, then
            CUDA graphs.
        activation_bytes: what activations take in a step by that plan: a CUDA graph holds as much once more.
        offloads: layer inputs go to host memory.
        reduces_apart: gradients of several processes are reduced between micro-steps: one may run again by itself.
    """

    def __init__(self) -> None:
        self.memory_reclaimers: list[Callable[[], bool]] = []
        self.undo: list[Callable[[], Callable[[], None]]] = []
        self.waiting: list[Callable[[], bool]] = []
        self.version = self.rows = 0
        self.activations_left: int | None = None
        self.activation_bytes = 0
        self.offloads = self.reduces_apart = False

    def reclaim_memory(self) -> bool:
        """Free memory that is worth less than what any layer keeps; False where there is none."""
        return any(reclaim() for reclaim in self.memory_reclaimers)

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that takes back the figures of all micro-batches from here on; it may be called twice."""
        marks = [begin() for begin in self.undo]

        def back() -> None:
            for undo in marks:
                undo()

        return back

    @property
    def is_warmed_up(self) -> bool:
        """Nothing is left that the first steps decide: what compiles, which rows are merged."""
        return not any(waits() for waits in self.waiting)

    @contextmanager
    def waiting_for(self, waits: Callable[[], bool]) -> Iterator[None]:
        """Count `waits` among what is to be decided, until the context ends."""
        self.waiting.append(waits)
        try:
            yield
        finally:
            self.waiting.remove(waits)

    def layers_changed(self) -> None:
        """Say that layers run otherwise from now on: what was recorded of them is of before."""
        self.version += 1
