"""Several sides over one set of weights, each advanced by a step in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from benchmarks.steps import Step, SteppedTrainer
from fastpack_trl.measure.device_memory import PeakMemory, free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SideTurns:
    """The steps of `measure_in_turns`.

    Attributes:
        sides: those that could be made, by name.
        found: their steps with what each took of memory, and their seconds.
        failed: the reason of each side that could not be made or broke off.
        other_load: cores that other processes kept busy.
    """

    sides: dict[str, SteppedTrainer]
    found: Rounds[tuple[Step, Any]]
    failed: dict[str, str]
    other_load: float | None


def measure_in_turns(
    names: Sequence[str], make: Callable[[str, SteppedTrainer | None], SteppedTrainer], *, weights: nn.Module,
    device: str, **options: Any,
) -> SideTurns:  # fmt: skip
    """Make trainers and time their steps in turn; all of them train `weights`.

    Args:
        names: of the sides.
        make: the side of a name, given the first one, whose optimizer it is to use.
        weights: the module whose gradients are dropped when a side fails: a backward that broke off leaves some.
        device: ``cpu`` or ``cuda``.
        options: of `take_turns`.
    """
    sides: dict[str, SteppedTrainer] = {}
    failed: dict[str, str] = {}
    for name in names:
        side, failure = attempt(partial(make, name, next(iter(sides.values()), None)))
        if side is None:
            failed[name] = failure or ""
        else:
            sides[name] = side
    calls = {name: partial(_step, side, device) for name, side in sides.items()}
    found, load = loaded_turns(calls, device, dropped=weights.zero_grad, **options)
    return SideTurns(sides, found, failed | found.failed, load)


def loaded_turns(
    calls: Mapping[str, Callable[[], T]], device: str, *, dropped: Callable[[], object] = lambda: None, rounds: int,
    least: int = 3, **options: Any,
) -> tuple[Rounds[T], float | None]:  # fmt: skip
    """Return what `take_turns` does, and the cores that other processes kept busy in the timed rounds.

    Args:
        calls: by side.
        device: whose memory a side that fails gives back.
        dropped: called then, before.
        rounds, least, options: of `take_turns`.
    """
    load = OtherLoad()

    def drop(_name: str, _reason: str) -> None:
        dropped()
        free_memory(device)

    found = take_turns(calls, rounds=rounds, least=min(least, rounds), begin=load.restart, dropped=drop, **options)
    return found, load.cores()


def largest_memory(steps: Sequence[tuple[Any, Any]]) -> dict[str, int] | None:
    """Return the memory of the step with the highest peak, of steps with their `PeakMemory.read`; None on the CPU."""
    memory: list[dict[str, int]] = [used for _, used in steps if used is not None]
    return max(memory, key=lambda used: used["peak_bytes"]) if memory else None


def _step(side: SteppedTrainer, device: str) -> tuple[Step, Any]:
    memory = PeakMemory(device)
    return side.step(), memory.read()
