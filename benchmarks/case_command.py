"""``python -m benchmarks.CASE``: one parser, record and table for the cases whose rows are trainings."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.one_line import in_one_line, record_of
from fastpack_trl.bench.config_run import EXIT_INTERRUPTED
from fastpack_trl.bench.result_file import ResultFile, Task, run_rows
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.record import check_writable

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCommand:
    """One case of the command line.

    Attributes:
        case: its name, and that of its module.
        help: the docstring of the module.
        rows: names that ``--rows`` takes; also by position, as the pages have them.
        default_rows: what is measured without ``--rows``.
        settings: returns the settings of the record from the arguments.
        table: returns a record for people.
        tasks: returns what is measured, in order, from the arguments.
        sides: names that ``--sides`` takes; none where the case has them fixed.
        default_sides: without ``--sides``.
        rounds: runs of each side without ``--rounds``; None where there is one.
        seconds: for all rows without ``--seconds``.
        alike: rows take about as long as each other (`run_rows`).
        row: what one of `rows` is called.
        more: adds further options.
        figure: draws a record, given the name of its file too.
        passed: returns whether all is well with a record: the exit code is 1 where it is not.
    """

    case: str
    help: str | None
    rows: Collection[str]
    default_rows: Sequence[str]
    settings: Callable[[Namespace], Mapping[str, Any]]
    table: Callable[[Record], str]
    tasks: Callable[[Namespace], Sequence[Task]] = lambda args: ()
    sides: Collection[str] = ()
    default_sides: Sequence[str] = ()
    rounds: int | None = 1
    seconds: float = math.inf
    alike: bool = False
    row: str = "row"
    more: Callable[[ArgumentParser], None] = lambda parser: None
    figure: Callable[[Record, str], Any] | None = None
    passed: Callable[[Record], bool] = lambda record: True

    def parser(self) -> ArgumentParser:
        """Return the parser of the case."""
        parser = ArgumentParser(prog=f"python -m benchmarks.{self.case}", description=self.help)
        add = parser.add_argument
        names = self.row.upper()
        add("names", nargs="*", metavar=names, help=f"of {', '.join(self.rows)}")
        default = ", ".join(self.default_rows) or "all"
        add(*dict.fromkeys(("--rows", f"--{self.row}s")), nargs="+", metavar=names, dest="rows",
            help=f"the same (default: {default})")  # fmt: skip
        if self.sides:
            add("--sides", nargs="+", default=list(self.default_sides), metavar="SIDE",
                help=f"of {', '.join(self.sides)} (default: %(default)s)")  # fmt: skip
        if self.rounds is not None:
            add("--rounds", type=int, default=self.rounds, help="runs of each side (default: %(default)s)")
        add("--seconds", type=float, default=self.seconds, help="for all rows (%(default)s); the next command goes on")
        add("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
        add("--again", action="store_true", help="measure anew what FILE has")
        add("--report", "--from", metavar="FILE", help="measure nothing: print the table of a record")
        if self.figure is not None:
            add("--plot", metavar="PNG", help="draw the record")
        add("--seed", type=int, default=0, help="of weights, data and order")
        self.more(parser)
        return parser

    def arguments(self, given: Sequence[str] | None = None) -> Namespace:
        """Return the parsed arguments.

        Raises:
            UserError: an unknown row or side.
        """
        args = self.parser().parse_args(given)
        args.rows = [*args.names, *(args.rows or ())] or list(self.default_rows)
        if args.report is None:
            known(args.rows, self.rows, self.row)
            known(getattr(args, "sides", ()), self.sides, "side")
        return args

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

    def run(self, given: Sequence[str] | None = None) -> int:
        """Measure the rows, or read their record; print the table.

        Raises:
            UserError: see `arguments` and `measure`; a file that cannot be written, or is no record.
        """
        args = self.arguments(given)
        if args.report is not None:
            record: Record = record_of(args.report, self.case)
        else:
            file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
            record = self.measure(args, file)
            if file is not None:
                file.save(record)
        print(self.table(record))
        if self.figure is not None and args.plot is not None:
            self.figure(record, Path(args.report or args.json or "").name).savefig(args.plot)
        if not record["complete"] and args.report is None:
            return EXIT_INTERRUPTED
        return 0 if self.passed(record) else 1

    def main(self) -> int:
        """Run the command line of this process; what is wrong with it is one line."""
        return in_one_line(f"python -m benchmarks.{self.case}", self.run)


def known(asked: Sequence[str], names: Collection[str], what: str = "row") -> None:
    """Raise `UserError` for the first name that does not exist."""
    for name in asked:
        if name not in names:
            raise UserError(f"there is no {what} {name!r}{did_you_mean(name, names)} ({what}s: {', '.join(names)})")
