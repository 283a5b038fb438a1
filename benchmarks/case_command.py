"""``python -m benchmarks.CASE``, for the cases whose rows are trainings: options, record, table and picture of one."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import Record, in_one_line, measured, parse
from fastpack_trl.bench.result_file import ResultFile, Task, run_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCommand:
    """One case of the command line.

    Attributes:
        case: its name, and that of its module.
        help: the docstring of the module.
        rows: names that ``--rows`` takes; also by position, as the pages have them.
        default_rows: what is measured without ``--rows``; None: all.
        settings: returns the settings of the record from the arguments.
        table: returns a record for people.
        tasks: returns what is measured, in order, from the arguments.
        sides: names that ``--sides`` takes; none where the case has them fixed.
        default_sides: without ``--sides``; None: all.
        rounds: runs of each side without ``--rounds``.
        seconds: for all rows without ``--seconds``.
        alike: rows take about as long as each other (`run_rows`).
        more: adds further options.
        figure: draws a record, given the name of its file too.
    """

    case: str
    help: str | None
    rows: Collection[str]
    settings: Callable[[Namespace], Mapping[str, Any]]
    table: Callable[[Record], str]
    tasks: Callable[[Namespace], Sequence[Task]] = lambda args: ()
    default_rows: Sequence[str] | None = None
    sides: Collection[str] = ()
    default_sides: Sequence[str] | None = None
    rounds: int = 1
    seconds: float = math.inf
    alike: bool = False
    more: Callable[[ArgumentParser], object] = lambda parser: None
    figure: Callable[[Record, str], Any] | None = None

    def arguments(self, given: Sequence[str] | None = None) -> Namespace:
        """Return the parsed arguments; raises what `parse` does."""
        return parse(
            self.case, self.help, given, rows=tuple(self.rows), default_rows=self.default_rows, sides=tuple(self.sides),
            default_sides=self.default_sides, rounds=self.rounds, seconds=self.seconds, extra=self.more,
        )  # fmt: skip

    def measure(self, args: Namespace, file: ResultFile | None = None, *, progress: bool = True) -> dict[str, Any]:
        """Return the record of the rows; one that fails is an entry with its error.

        Raises:
            UserError: what the case cannot run here; `file` holds another run.
        """
        import torch

        threads = getattr(args, "threads", torch.get_num_threads())
        return run_rows(
            self.tasks(args), case=self.case, settings=self.settings(args), apart={"seconds": args.seconds},
            seconds=args.seconds, alike=self.alike, device="cuda" if torch.cuda.is_available() else "cpu",
            threads=threads, seed=args.seed, file=file, progress=progress,
        )  # fmt: skip

    def main(self, given: Sequence[str] | None = None) -> int:
        """Measure the rows, or read their record; print the table, and return the exit code."""
        args = self.arguments(given)
        return measured(args, self.case, lambda file: self.measure(args, file), self.table, self.figure)

    def start(self) -> int:
        """Run the command line of this process; what is wrong with it is one line."""
        return in_one_line(f"python -m benchmarks.{self.case}", self.main)
