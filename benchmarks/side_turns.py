"""Several trainers over one set of weights, each advanced by a step in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.steps import Side, Step
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import PeakMemory, Rounds, attempt, free_memory, take_turns
from fastpack_trl.measure.timing import Clock


@dataclass(frozen=True, slots=True)
class SideTurns:
    """What `measure_in_turns` saw.

    Attributes:
        sides: those that could be made, by name.
        found: their steps with what each took of memory, and their seconds.
        failed: the reason of each side that could not be made or broke off.
        other_load: cores that other processes kept busy.
    """

    sides: dict[str, Side]
    found: Rounds[tuple[Step, Any]]
    failed: dict[str, str]
    other_load: float | None


def measure_in_turns(
    names: Sequence[str],
    make: Callable[[str, Side | None], Side],
    *,
    weights: nn.Module,
    device: str,
    rounds: int,
    warmup: int,
    least: int,
    seconds: float,
    clock: Clock,
) -> SideTurns:
    """Make the sides and time their steps in turn; all of them train `weights`.

    Args:
        names: of the sides.
        make: the side of a name, given the first one, whose optimizer it is to use; one that fails is left out, named.
        weights: the module whose gradients are dropped when a side fails.
        device: ``cpu`` or ``cuda``.
        rounds, warmup, least, seconds, clock: as in `take_turns`.
    """
    sides: dict[str, Side] = {}
    failed: dict[str, str] = {}

    for name in names:
        side, failure = attempt(partial(make, name, next(iter(sides.values()), None)))
        if side is None:
            failed[name] = failure or ""
        else:
            sides[name] = side
    load = OtherLoad()

    def clean() -> None:
        weights.zero_grad()
        free_memory(device)

    found: Rounds[tuple[Step, Any]] = take_turns(
        {name: partial(_step, side, device) for name, side in sides.items()},
        rounds=rounds,
        warmup=warmup,
        seconds=seconds,
        least=min(least, rounds),
        clock=clock,
        begin=load.restart,
        clean=clean,
    )
    return SideTurns(sides, found, failed | found.failed, load.cores())


def _step(side: Side, device: str) -> tuple[Step, Any]:
    memory = PeakMemory(device)
    return side.step(), memory.read()
