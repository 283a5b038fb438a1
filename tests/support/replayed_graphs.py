"""A device that records graphs, without one: a replay runs the recorded work again, on what its tensors hold then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Instant:
    """A point in time, which the device has passed `late` looks later."""

    def __init__(self, seconds: float, late: int = 0) -> None:
        self._seconds, self._late = seconds, late

    def until(self, later: Instant) -> float | None:
        later._late -= 1
        return None if later._late >= 0 else later._seconds - self._seconds


class AgainGraph:
    """As a CUDA graph: it adds to the gradients that it was recorded with, and writes the results it returned then."""

    def __init__(self, device: AgainDevice, work: Callable[[], Any], results: tuple[Tensor, ...]) -> None:
        self._device, self._work, self._results = device, work, results
        self._gradients = {parameter: parameter.grad for parameter in device.parameters()}

    def replay(self) -> None:
        assert self._work is not None, "replayed after its memory was given back"
        for parameter, gradient in self._gradients.items():
            assert parameter.grad is gradient, "a graph adds to the tensors that it was recorded with"
        self._device.log.append("replay")
        self._device.replaying = True
        try:
            for result, again in zip(self._results, self._work(), strict=True):
                result.copy_(again)
        finally:
            self._device.replaying = False
        if self._device.after_replay is not None:
            self._device.after_replay(self._results)

    def reset(self) -> None:
        self._device.log.append("reset")
        self._work = None  # type: ignore[assignment]


@dataclass
class AgainDevice:
    """What `step.graph_device.GraphDevice` asks for, with a log of it."""

    model: nn.Module
    now: float = 0.0
    """Set on by whoever runs steps."""
    late: int = 0
    log: list[str] = field(default_factory=list)
    fail: Callable[[int], BaseException | None] = lambda number: None
    after_replay: Callable[[tuple[Tensor, ...]], None] | None = None
    replaying: bool = False
    _recorded: int = 0

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[AgainGraph, tuple[Tensor, ...]]:
        """Run the work for the shapes of its results, undo it, and leave in them what no one may read."""
        self._recorded += 1
        error = self.fail(self._recorded)
        if error is not None:
            self.log.append("failed")
            raise error
        self.log.append("record")
        gradients = [parameter.grad for parameter in self.parameters()]
        before = [None if gradient is None else gradient.clone() for gradient in gradients]
        state = torch.get_rng_state()
        results = tuple(result.clone() for result in work())
        torch.set_rng_state(state)
        for parameter, gradient, value in zip(self.parameters(), gradients, before, strict=True):
            assert parameter.grad is gradient, "recording must not replace a gradient"
            if gradient is not None and value is not None:
                gradient.copy_(value)
        for result in results:
            result.fill_(float("nan"))
        return AgainGraph(self, work, results), results

    @contextlib.contextmanager
    def run_apart(self) -> Iterator[None]:
        self.log.append("apart")
        yield
        self.log.append("together")

    def mark(self) -> Instant:
        return Instant(self.now, self.late)

    def bytes_held(self) -> int:
        return 3 << 30
