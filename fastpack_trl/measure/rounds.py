"""Any number of callables timed in turn in one process, under a budget; one that fails drops out with its reason."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastpack_trl.measure.timing import Clock, Interval, WallClock, median_interval

T = TypeVar("T")

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError)
"""What a kernel, a compiler or an operator raises that cannot do what it is asked, or that an older torch lacks. Out of
memory on a device is among them; an interrupt is not."""

_REASON = 300  # characters: a compiler's message can be pages long


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """What `take_turns` measured.

    Attributes:
        seconds: per side that went through, one entry per round.
        results: per side that went through, what its callable returned in each round.
        failed: per side that did not, the reason; it appears nowhere else.
        order: the sides in the order in which they ran, warm-up left out.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, list[T]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def time(self, name: str) -> Interval:
        """Median and interval of one side's seconds."""
        return median_interval(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> dict[str, Any]:
        """Seconds of `slow` / seconds of `fast`, round by round: median, interval and every value."""
        values = [a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True)]
        return {**median_interval(values).to_dict(), "values": values}


def turn_order(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: every second one runs backwards, and of three or more each comes first in its turn.

    ``a b``: a b, b a, a b, ... ``a b c``: a b c, c b a, b c a, a c b, c a b, b a c.
    """
    shift = index // 2 % len(names) if len(names) > 2 else 0
    turn = [*names[shift:], *names[:shift]]
    return turn if index % 2 == 0 else turn[::-1]


def take_turns(
    sides: Mapping[str, Callable[[], T]],
    *,
    rounds: int,
    warmup: int = 1,
    seconds: float = float("inf"),
    least: int = 1,
    clock: Clock | None = None,
    clean: Callable[[], None] = lambda: None,
    begin: Callable[[], None] = lambda: None,
) -> Rounds[T]:
    """Time each side once per round, in the order of `turn_order`.

    So what the machine does beside hits all sides alike, and a drift over the run cancels in the ratio of a round.

    Args:
        sides: names with their callables.
        rounds: timed rounds at most.
        warmup: rounds run before, not timed.
        seconds: no further round is started after that many; the warm-up counts.
        least: timed rounds that are run in any case.
        clock: `WallClock` by default.
        clean: called after a failure, e.g. to give memory back.
        begin: called before the first timed round, e.g. `OtherLoad.restart`: a warm-up may compile in other processes.

    Raises:
        ValueError: no side, or fewer than one round.
    """
    if not sides or rounds < 1 or least < 1 or warmup < 0:
        raise ValueError(f"{len(sides)} sides, rounds={rounds}, least={least}, warmup={warmup}: nothing to time")
    clock = clock or WallClock()
    end_at = time.perf_counter() + seconds
    found: Rounds[T] = Rounds({name: [] for name in sides}, {name: [] for name in sides})
    alive = list(sides)
    for index in range(-warmup, rounds):
        if index >= least and time.perf_counter() >= end_at:
            break
        if index == 0:
            begin()
        for name in turn_order(alive, index):
            clock.synchronise()
            start = clock.mark()
            result, failure = attempt(sides[name])
            end = clock.mark()
            if failure is None:
                # What the device could not do may only be told here.
                _, failure = attempt(clock.synchronise)
            if failure is not None:
                alive.remove(name)
                found.failed[name] = failure
                clean()
            elif index >= 0:
                found.seconds[name].append(clock.seconds(start, end))
                found.results[name].append(result)  # type: ignore[arg-type]
                found.order.append(name)
    for name in found.failed:
        del found.seconds[name], found.results[name]
    return found


def attempt(call: Callable[[], T], loud: tuple[type[BaseException], ...] = ()) -> tuple[T | None, str | None]:
    """``(result, None)``, or ``(None, reason)`` where `call` raised one of `FAILURES`, those of `loud` excepted."""
    try:
        return call(), None
    except FAILURES as error:
        if isinstance(error, loud):
            raise
        reason = describe_failure(error)
    # After the handler: the traceback holds the tensors of the call until here.
    gc.collect()
    return None, reason


def describe_failure(error: BaseException) -> str:
    """One line with the kind of the error and the start of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_REASON].rstrip(": ")


def free_memory(device: str) -> None:
    """Give unused device memory back, so that the next side does not run in what a failed one left."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


class PeakMemory:
    """Bytes of device memory that a step needs at most, and those that lie there before it; None on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = int(torch.cuda.memory_allocated())

    def read(self) -> dict[str, int] | None:
        """``{"peak_bytes", "before_bytes"}`` since construction."""
        if self.before is None:
            return None
        import torch

        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "before_bytes": self.before}
