"""Several trainers over one set of weights, each advanced by a step in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.steps import Step, SteppedTrainer
from fastpack_trl.measure.device_memory import PeakMemory, free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.measure.timing import Clock


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
    names: Sequence[str], make: Callable[[str, SteppedTrainer | None], SteppedTrainer], **options: Any
) -> SideTurns:
    """Make the sides (`make_sides`) and time their steps (`time_sides`, which takes the options)."""
    sides, failed = make_sides(names, make)
    found, other_load = time_sides(sides, **options)
    return SideTurns(sides, found, failed | found.failed, other_load)


def make_sides(
    names: Sequence[str], make: Callable[[str, SteppedTrainer | None], SteppedTrainer]
) -> tuple[dict[str, SteppedTrainer], dict[str, str]]:
    """Return the sides that could be made, and why the others could not.

    Args:
        names: of the sides.
        make: the side of a name, given the first one, whose optimizer it is to use.
    """
    sides: dict[str, SteppedTrainer] = {}
    failed: dict[str, str] = {}
    for name in names:
        side, failure = attempt(partial(make, name, next(iter(sides.values()), None)))
        if side is None:
            failed[name] = failure or ""
        else:
            sides[name] = side
    return sides, failed


def time_sides(
    sides: Mapping[str, SteppedTrainer], *, weights: nn.Module, device: str, rounds: int, warmup: int, least: int,
    seconds: float, clock: Clock,
) -> tuple[Rounds[tuple[Step, Any]], float | None]:  # fmt: skip
    """Time steps of the sides in turn; all of them train `weights`.

    Args:
        sides: by name.
        weights: the module whose gradients are dropped when a side fails: a backward that broke off leaves some.
        device: ``cpu`` or ``cuda``.
        rounds, warmup, least, seconds, clock: as in `take_turns`.

    Returns:
        The steps with what each took of memory, and the cores that other processes kept busy meanwhile.
    """
    load = OtherLoad()

    def dropped(_name: str, _reason: str) -> None:
        weights.zero_grad()
        free_memory(device)

    found = take_turns(
        {name: partial(_step, side, device) for name, side in sides.items()},
        rounds=rounds,
        warmup=warmup,
        seconds=seconds,
        least=min(least, rounds),
        clock=clock,
        begin=load.restart,
        dropped=dropped,
    )
    return found, load.cores()


def largest_memory(steps: Sequence[tuple[Any, Any]]) -> dict[str, int] | None:
    """Return the memory of the step with the highest peak, of steps with their `PeakMemory.read`; None on the CPU."""
    memory: list[dict[str, int]] = [used for _, used in steps if used is not None]
    return max(memory, key=lambda used: used["peak_bytes"]) if memory else None


def _step(side: SteppedTrainer, device: str) -> tuple[Step, Any]:
    memory = PeakMemory(device)
    return side.step(), memory.read()
