"""What cases share whose sides take turns in one process: options, the loop over rows, and how calls are timed."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.intervals import summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.measure.timing import Clock, clock_of

T = TypeVar("T")

INTERVAL = "order statistics of the median; `coverage` is the least probability that they cover it"
LEAST_ROUNDS = 3
_WARMUP_MS, _REPEAT_MS = 5, 20  # of `triton.testing.do_bench`: a round is the median of about that long


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The options that every case has: ``Run(rounds=9, seconds=480.0)``.

    Attributes:
        rounds: timed passes per side at most; 6 or more give an interval of 95 %.
        seconds: for the whole call; each row may use an equal share of what is left, and a row that finds no time is
            skipped, named.
        file: written after every row; what it has of this very run is taken over (`run_rows`).
    """

    rounds: int
    seconds: float = 480.0
    threads: int = 2
    device: str = "cpu"
    seed: int = 0
    progress: bool = False
    file: ResultFile | None = None

    @classmethod
    def of(cls, args: Namespace, file: ResultFile | None) -> Run:
        """Return the run that options of `CaseCommand.arguments` ask for, on the GPU where there is one."""
        return cls(
            rounds=args.rounds, seconds=args.seconds, threads=getattr(args, "threads", torch.get_num_threads()),
            device="cuda" if torch.cuda.is_available() else "cpu", seed=args.seed, progress=True, file=file,
        )  # fmt: skip

    def record(
        self, case: str, tasks: Sequence[RowTask], settings: Mapping[str, Any], *,
        apart: Mapping[str, Any] | None = None, alike: bool = False, loud: tuple[type[BaseException], ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Measure the rows and return their record; the arguments are those of `run_rows`.

        Raises:
            UserError: no round, no thread, no time; the file holds another run.
        """
        if self.rounds < 1 or self.threads < 1 or self.seconds <= 0:
            raise UserError(
                f"rounds={self.rounds}, threads={self.threads}, seconds={self.seconds:g}: each must be above 0"
            )
        with limited_threads(self.threads), quiet():
            return run_rows(
                tasks, case=case, settings={"rounds": self.rounds, **settings, "interval": INTERVAL},
                apart={"seconds": self.seconds, **(apart or {})}, seconds=self.seconds, device=self.device,
                threads=self.threads, seed=self.seed, file=self.file, alike=alike, loud=loud, progress=self.progress,
            )  # fmt: skip

    def turns(
        self, sides: Mapping[str, Callable[[], Any]], *, warmup: int, end_at: float, clock: Clock | None = None
    ) -> tuple[Rounds[Any], float | None]:
        """Call the sides in turn until `end_at` (of `time.perf_counter`), at least `LEAST_ROUNDS` times.

        Returns:
            What they took and returned, and the cores that other processes kept busy meanwhile.
        """
        if not sides:
            return Rounds(), None
        return loaded_turns(
            sides, self.device, rounds=self.rounds, least=LEAST_ROUNDS, warmup=warmup,
            seconds=end_at - time.perf_counter(), clock=clock,
        )  # fmt: skip


def add_sizes(parser: ArgumentParser, *, layers: bool = False, threads: int | None = None) -> None:
    """Add the options of row lengths, of decoder layers, and of CPU threads with their default."""
    add = parser.add_argument
    add("--tokens", metavar="N", nargs="+", type=int, help="row lengths in tokens (default: those of the case)")
    if layers:
        add("--layers", metavar="N", type=int, help="only the first N decoder layers (stated in the row)")
    if threads is not None:
        add("--threads", metavar="N", type=int, default=threads, help="CPU threads of torch (default: %(default)s)")


def loaded_turns(
    calls: Mapping[str, Callable[[], T]], device: str, *, rounds: int, least: int = 3, **options: Any
) -> tuple[Rounds[T], float | None]:
    """Return what `take_turns` does, and the cores that other processes kept busy in the timed rounds.

    Args:
        device: whose memory a side that fails gives back.
    """
    load, free = OtherLoad(), partial(free_memory, device)
    found = take_turns(calls, rounds=rounds, least=min(least, rounds), begin=load.restart, dropped=free, **options)
    return found, load.cores()


def row_lengths(tokens: Sequence[int] | None, default: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Return the row lengths that were given, or the default.

    Raises:
        UserError: one is below `least`, the longest document.
    """
    lengths = tuple(tokens or default)
    if min(lengths) < least:
        raise UserError(
            f"tokens={min(lengths)} is below {least}: a row has at least one token"
            if least == 1
            else f"tokens={min(lengths)} is shorter than the longest document ({least} tokens), which would be cut: "
            f"give {least} or more"
        )
    return lengths


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call: on CUDA between two events, with a cold cache (`triton.testing.do_bench`).

    A call that launches more slowly than the device works is timed with the host's gaps.
    """
    if device == "cuda":
        from triton.testing import do_bench

        milliseconds: float = do_bench(call, warmup=_WARMUP_MS, rep=_REPEAT_MS, return_mode="median")
        return milliseconds / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class PeakMemory:
    """Bytes of device memory that a step needs at most, and those that lie there before it; None on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = int(torch.cuda.memory_allocated())

    def read(self) -> dict[str, int] | None:
        """Return ``{"peak_bytes", "before_bytes"}`` since construction, allocated; None on the CPU.

        What torch holds beside, caches and CUDA graphs, is that of all that ran in the process.
        """
        if self.before is None:
            return None
        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "before_bytes": self.before}


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass: three marks of a clock, and bytes of memory."""

    start: Any
    middle: Any
    end: Any
    memory: dict[str, int] | None

    @classmethod
    def of(cls, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any], device: str) -> tuple[Pass, Tensor]:
        """Run both; return the output too."""
        clock, memory = clock_of(device), PeakMemory(device)
        start = clock.mark()
        out = forward()
        middle = clock.mark()
        backward(out)
        return cls(start, middle, clock.mark(), memory.read()), out


def summaries(passes: Sequence[Pass], device: str) -> dict[str, dict[str, Any]]:
    """Return the seconds of the passes: ``forward``, ``backward`` and, of both, ``seconds``."""
    clock = clock_of(device)
    return {
        "forward": summary([clock.seconds(one.start, one.middle) for one in passes]),
        "backward": summary([clock.seconds(one.middle, one.end) for one in passes]),
        "seconds": summary([clock.seconds(one.start, one.end) for one in passes]),
    }
