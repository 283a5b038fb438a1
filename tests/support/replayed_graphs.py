"""A device that records graphs, without one: the operations of a recording run again, and no Python around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Idle:
    """A device that was found idle for a share of the time."""

    def __init__(self, share: float, seconds: float) -> None:
        self._watched = share, seconds

    def stop(self) -> tuple[float, float]:
        return self._watched


class Tape(TorchDispatchMode):
    """Keeps every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out


class TapeGraph:
    """As a CUDA graph: it reads and writes the memory that the recording read and wrote, whatever Python says now."""

    def __init__(self, device: TapeDevice, tape: Tape, results: tuple[Tensor, ...]) -> None:
        self._device, self._operations, self._results = device, tape.operations, results

    def replay(self) -> None:
        assert self._operations, "replayed after its memory was given back"
        self._device.log.append("replay")
        with torch.no_grad():
            for func, args, kwargs, out in self._operations:
                again = tree_leaves(func(*args, **kwargs))
                for result, value in zip(tree_leaves(out), again, strict=True):
                    if isinstance(result, Tensor) and result.numel() and result.data_ptr() != value.data_ptr():
                        result.data.copy_(value)
        if self._device.after_replay is not None:
            self._device.after_replay(self._results)

    def reset(self) -> None:
        self._device.log.append("reset")
        self._operations = []


@dataclass
class TapeDevice:
    """What `CudaGraphs` does, with a log of it."""

    model: nn.Module
    idle: Sequence[float] = (0.5,)
    """Shares of eager steps for which it waits for the host, in turn."""
    seconds: Sequence[float] = (1.0,)
    """That these steps take, in turn."""
    log: list[str] = field(default_factory=list)
    fail: Callable[[int], BaseException | None] = lambda number: None
    after_replay: Callable[[tuple[Tensor, ...]], None] | None = None
    room: str = ""
    held: int = 3 << 30
    _recorded: int = 0

    def prepare(self) -> None:
        self.log.append("prepare")

    def record(self, work: Callable[[], tuple[Tensor, ...]], pool: str = "") -> tuple[TapeGraph, tuple[Tensor, ...]]:
        """Run the work to see its operations, take back what it did, and leave results that no one may read."""
        self._recorded += 1
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        values = [parameter.detach().clone() for parameter in parameters]
        before = [None if gradient is None else gradient.clone() for gradient in gradients]
        state = torch.get_rng_state()
        with Tape() as tape:
            results = work()
        torch.set_rng_state(state)
        for parameter, value, gradient, old in zip(parameters, values, gradients, before, strict=True):
            assert parameter.grad is gradient, "recording must not replace a gradient, nor make one"
            parameter.data.copy_(value)
            if gradient is not None and old is not None:
                gradient.copy_(old)
        error = self.fail(self._recorded)
        if error is not None:
            self.log.append("failed")
            raise error
        self.log.append("record")
        for result in results:
            result.data.fill_(float("nan"))
        return TapeGraph(self, tape, results), results

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        self.log.append("apart")
        yield
        self.log.append("together")

    @contextlib.contextmanager
    def steps_in_order(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self.log.append(f"order {type(optimizer).__name__}")
        yield
        self.log.append(f"leave {type(optimizer).__name__}")

    def watch_idle(self) -> Idle:
        number = self.log.count("watch")
        self.log.append("watch")
        return Idle(self.idle[number % len(self.idle)], self.seconds[number % len(self.seconds)])

    def lacks_room(self) -> str:
        return self.room

    def forget(self) -> None:
        self.log.append("forget")
