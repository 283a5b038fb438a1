"""What ``python -m benchmarks`` can measure, and the parser, record and exit code that all of it shares."""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpack_trl.bench.report import read_record
from fastpack_trl.bench.result_file import ResultFile, Task, run_rows
from fastpack_trl.cli.main import EXIT_INTERRUPTED, EXIT_USER_ERROR, CommandParser, _without_kernel_advice
from fastpack_trl.errors import UserError, describe, did_you_mean
from fastpack_trl.measure.record import check_writable

PROG = "python -m benchmarks"
Record = Mapping[str, Any]

COMMANDS = {
    "side_by_side": "whole trainings beside what people use, a process per side",
    "first_step": "seconds to the first step and of short runs, with cold and warm compile caches",
    "equal_memory": "4-bit LoRA beside compiled stock at the same peak of memory",
    "memory_caps": "the largest row and tokens/s under caps of device memory",
    "fp8_steps": "whole trainings over a base in FP8",
    "several_gpus": "stock and fastpack under accelerate launch, DDP and FSDP 2",
    "preference": "optimizer steps of the five trainers that score completions beside TRL's",
    "shared_prefixes": "optimizer steps on packed rows whose documents begin alike, each prefix once and whole",
    "row_profile": "device time of a step by kind of kernel, beside its bound",
    "by_itself": "one optimisation on against off: metadata, reload or routing",
    "hybrid": "hybrid models: packed rows beside stock's padded batch, eager and compiled",
    "host_overhead": "time of a LoRA step outside of forward, backward, clipping and optimizer: both trainers' loops",
    "moe": "mixture-of-experts: stock grouped_mm and PEFT beside fastpack, one block and decoders",
    "activation_memory": "layer inputs in host memory: checkpointing without, upstream's offloads and ours",
    "collator": "fetch and collate of packed rows: PackingCollator beside TRL's collator",
    "fp8_accuracy": "held-out loss of LoRA over a base in FP8, NF4 and bf16",
    "cuda_tests": "the tests marked cuda, as a record",
    "stale": "which records are of older code",
    "readme": "write tables and pictures of the records into the pages",
}
"""Modules of this folder with a `COMMAND` or a `main`: ``python -m benchmarks.NAME`` is the same."""


def add_common(parser: ArgumentParser, rows: str) -> None:
    """Add the options that every case has; `rows` says which rows there are."""
    add = parser.add_argument
    add("--rows", "--model", metavar="ROW", nargs="+", help=rows)
    add("--rounds", "--pairs", metavar="N", type=int, help="of each side; 6 or more for an interval of 95 %%")
    add("--seconds", metavar="S", type=float, help="for all rows; what finds no time is named")
    add("--json", metavar="FILE", help="write the record to FILE, row by row; the same command goes on with it")
    add("--again", action="store_true", help="measure anew what FILE has, and replace it")
    add("--seed", metavar="N", type=int, default=0, help="of weights, documents and order (default: 0)")


def _names(names: Collection[str] | None, default: Sequence[str] | None) -> str:
    if names is None:
        return "there are none"
    return f"of {', '.join(names)} (default: {'all' if default is None else ', '.join(default)})"


def _chosen(kind: str, given: list[str], names: Collection[str] | None, default: Sequence[str] | None) -> list[str]:
    chosen = given if names is not None and not names else known(kind, given, names or ())
    return chosen or list((names or ()) if default is None else default)


def known(kind: str, chosen: Sequence[str], names: Collection[str]) -> list[str]:
    """Return what was chosen.

    Raises:
        UserError: there is none of such a name.
    """
    for name in chosen:
        if name not in names:
            listed = ", ".join(names)
            raise UserError(f"there is no {kind} {name!r}{did_you_mean(name, names)} ({kind}s: {listed})")
    return list(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCommand:
    """``python -m benchmarks.CASE``: options, record, table and picture of one case.

    Attributes:
        rows: names that ``--rows`` takes; also by position, as the pages have them; empty: they are not checked; None:
            there are none.
        default_rows: what is measured without ``--rows``; None: all.
        tasks: returns what is measured, in order, from the arguments.
        settings: returns the settings of the record from the arguments.
        record: measures from the arguments and the file of ``--json``, in place of `tasks` and `settings`.
        sides: names that ``--sides`` takes; none where the case has them fixed.
        default_sides: without ``--sides``; None: all.
        rounds: runs of each side without ``--rounds``.
        seconds: for all rows without ``--seconds``.
        alike: rows take about as long as each other (`run_rows`).
        figure: draws a record, given the name of its file too.
    """

    case: str
    help: str | None
    table: Callable[[Record], str]
    rows: Collection[str] | None = None
    default_rows: Sequence[str] | None = None
    tasks: Callable[[Namespace], Sequence[Task]] = lambda args: ()
    settings: Callable[[Namespace], Mapping[str, Any]] = lambda args: {}
    record: Callable[[Namespace, ResultFile | None], dict[str, Any]] | None = None
    sides: Collection[str] = ()
    default_sides: Sequence[str] | None = None
    rounds: int = 1
    seconds: float = math.inf
    alike: bool = False
    more: Callable[[ArgumentParser], object] = lambda parser: None
    figure: Callable[[Record, str], Any] | None = None

    def arguments(self, given: Sequence[str] | None = None) -> Namespace:
        """Return the parsed arguments, those of the command line by default.

        Raises:
            UserError: a wrong option; a row or side that there is not.
        """
        raw = argparse.RawDescriptionHelpFormatter
        prog = f"{PROG}.{self.case}"
        parser = CommandParser(prog=prog, description=self.help, formatter_class=raw, allow_abbrev=False)
        add = parser.add_argument
        self.more(parser)
        add("named", metavar="ROW", nargs="*", help="rows, as --rows")
        add_common(parser, _names(self.rows, self.default_rows))
        parser.set_defaults(rows=[], rounds=self.rounds, seconds=self.seconds)
        if self.sides:
            add("--sides", metavar="SIDE", nargs="+", default=[], help=_names(self.sides, self.default_sides))
        add("--report", "--from", metavar="FILE", help="measure nothing: print the table of a record")
        add("--plot", metavar="PNG", help="draw the record, where it has a picture")
        args = parser.parse_args(given)
        args.rows = _chosen("row", [*args.named, *args.rows], self.rows, self.default_rows)
        if self.sides:
            args.sides = _chosen("side", args.sides, self.sides, self.default_sides)
        return args

    def measure(self, args: Namespace, file: ResultFile | None = None, *, progress: bool = True) -> dict[str, Any]:
        """Return the record of the rows; one that fails is an entry with its error.

        Raises:
            UserError: what the case cannot run here; `file` holds another run.
        """
        import torch

        if self.record is not None:
            return self.record(args, file)
        return run_rows(
            self.tasks(args), case=self.case, settings=self.settings(args), apart={"seconds": args.seconds},
            seconds=args.seconds, alike=self.alike, device="cuda" if torch.cuda.is_available() else "cpu",
            threads=torch.get_num_threads(), seed=args.seed, file=file, progress=progress,
        )  # fmt: skip

    def main(self, given: Sequence[str] | None = None) -> int:
        """Measure the rows, or read the record of ``--report``; write, print and draw it.

        Returns:
            The exit code: 130 for a record that was interrupted, 1 where a row has not passed.
        """
        args = self.arguments(given)
        if args.report is not None:
            record = record_of(args.report, self.case)
        else:
            file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
            record = self.measure(args, file)
            if file is not None:
                file.save(record)
        print(self.table(record))
        if args.plot is not None and self.figure is not None:
            self.figure(record, Path(args.report or args.json or "").name).savefig(args.plot)
        if not record["complete"]:
            return EXIT_INTERRUPTED
        return int(any(row.get("passed", True) in (False, 0) or row.get("failures") for row in record["rows"]))

    def start(self) -> int:
        """Run the command line of this process; what is wrong with it is one line."""
        return in_one_line(f"{PROG}.{self.case}", self.main)


def in_one_line(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; a `UserError` is one line, after its traceback if that is asked for.

    Args:
        run: returns the exit code; None is 0.
    """
    try:
        with _without_kernel_advice():
            return run() or 0
    except UserError as error:
        if os.environ.get("FASTPACK_TRACEBACK"):
            traceback.print_exc()
        print(f"{name}: error: {describe(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def record_of(file: str, case: str) -> dict[str, Any]:
    """Return the record in a file.

    Raises:
        UserError: there is none, or one of another case.
    """
    record = read_record(Path(file))
    if record["case"] != case:
        raise UserError(f"{file!r} is a record of {record['case']}: name one of {case}")
    return record
