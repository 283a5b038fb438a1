"""``python -m benchmarks.CASE``: one parser, record and table for the cases whose rows are trainings."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.one_line import in_one_line, record_of
from fastpack_trl.bench.result_file import ResultFile
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
        measure: makes a record from the arguments; the file is None without ``--json``.
        table: a record for people.
        sides: names that ``--sides`` takes; none where the case has them fixed.
        default_sides: without ``--sides``.
        rounds: runs of each side without ``--rounds``; None where there is one.
        seconds: for all rows without ``--seconds``.
        row: what one of `rows` is called.
        more: adds further options.
        figure: draws a record, given the name of its file too.
    """

    case: str
    help: str | None
    rows: Collection[str]
    default_rows: Sequence[str]
    measure: Callable[[Namespace, ResultFile | None], dict[str, Any]]
    table: Callable[[Record], str]
    sides: Collection[str] = ()
    default_sides: Sequence[str] = ()
    rounds: int | None = 1
    seconds: float = math.inf
    row: str = "row"
    more: Callable[[ArgumentParser], None] = lambda parser: None
    figure: Callable[[Record, str], Any] | None = None

    def parser(self) -> ArgumentParser:
        """Return the parser of the case."""
        parser = ArgumentParser(prog=f"python -m benchmarks.{self.case}", description=self.help)
        add = parser.add_argument
        names = self.row.upper()
        add("names", nargs="*", metavar=names, help=f"of {', '.join(self.rows)}")
        add("--rows", nargs="+", metavar=names, help=f"the same (default: {', '.join(self.default_rows)})")
        if self.sides:
            default = list(self.default_sides)
            add("--sides", nargs="+", default=default, metavar="SIDE", help=f"of {', '.join(self.sides)} (%(default)s)")
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

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Measure the rows, or read their record; print the table.

        Raises:
            UserError: an unknown row or side; a file that cannot be written, is no record, or is of another run.
        """
        args = self.parser().parse_args(arguments)
        args.rows = args.names or args.rows or list(self.default_rows)
        if args.report is not None:
            record: Record = record_of(args.report, self.case)
        else:
            known(args.rows, self.rows, self.row)
            known(getattr(args, "sides", ()), self.sides, "side")
            file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
            record = self.measure(args, file)
            if file is not None:
                file.save(record)
        print(self.table(record))
        if self.figure is not None and args.plot is not None:
            self.figure(record, Path(args.report or args.json or "").name).savefig(args.plot)
        return 0

    def main(self) -> int:
        """Run the command line of this process; what is wrong with it is one line."""
        return in_one_line(f"python -m benchmarks.{self.case}", self.run)


def known(asked: Sequence[str], names: Collection[str], what: str = "row") -> None:
    """Raise `UserError` for the first name that does not exist."""
    for name in asked:
        if name not in names:
            raise UserError(f"there is no {what} {name!r}{did_you_mean(name, names)} ({what}s: {', '.join(names)})")
