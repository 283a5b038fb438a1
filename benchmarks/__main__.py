"""``python -m benchmarks``, in a checkout: lists and runs what can be measured."""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from benchmarks import case_tables
from benchmarks.command import CASES, COMMANDS, PROG, Record, add_common, in_one_line, known
from benchmarks.record_commands import command_of
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.cli.main import EXIT_INTERRUPTED, CommandParser
from fastpack_trl.errors import UserError
from fastpack_trl.measure.record import check_writable, write_json


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m benchmarks``; return the exit code, as `fastpack_trl.cli.main.main` does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return in_one_line(PROG, lambda: _run(arguments))


def _run(arguments: list[str]) -> int | None:
    if arguments in ([], ["--list"]):
        named = CASES | COMMANDS
        width = max(map(len, named))
        print("\n".join(f"{name.ljust(width)}  {text}" for name, text in named.items()))
        return 0
    name, *rest = arguments
    if name in COMMANDS:
        command = import_module(f"benchmarks.{name}")
        ended: int | None = getattr(command, "COMMAND", command).main(rest)
        return ended
    parser = CommandParser(prog=PROG, description="The in-house cases of fastpack-trl.", allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(["--case", *arguments] if name in CASES else arguments))


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the cases; imports nothing heavy."""
    add = parser.add_argument
    add("--case", metavar="NAME", help=f"what to measure: {', '.join(CASES)}")
    add("--list", action="store_true", help="list the cases and the commands beside them, and stop")
    add_common(parser, "models of activation_memory and moe")
    add(
        "--report",
        metavar="FILE",
        nargs="*",
        help="Markdown tables and plots from these JSON files, or from the folders they lie in (default: the FILE of "
        "--json); measures nothing without --case",
    )
    add("--out", metavar="DIR", help="folder of the report (default: bench-report)")
    add("--tokens", metavar="N", nargs="+", type=int, help="row lengths in tokens (default: those of the case)")
    add("--layers", metavar="N", type=int, help="only the first N decoder layers (stated in the row)")
    add("--threads", metavar="N", type=int, help="CPU threads of torch (default: 2; moe, host_overhead, collator: 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where torch sees it")


_OF_CASES = {"rows": "--model", "tokens": "--tokens", "layers": "--layers"}
"""Options that only some cases have, by the parameter of their `measure`."""


def run(args: Namespace) -> int:
    """Measure a case, print its table, write its JSON and report.

    Returns:
        0, also where fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: no or an unknown case, an option that the case does not have, a JSON path that cannot be written.
    """
    from fastpack_trl.bench.canvas import require_matplotlib
    from fastpack_trl.bench.report import json_files

    if args.out is not None and args.report is None:
        raise UserError("--out names the folder of a report: give --report too")
    if args.report is not None and args.case is None:
        return _report(args.report, args.out)
    if args.case is None:
        raise UserError(f"no case: give --case, one of {', '.join(CASES)}; a run of your own: fastpack-trl bench")
    known("case", [args.case], list(CASES))
    if args.report is not None:  # what would make it fail after the measurement
        require_matplotlib()
        if args.json is None:
            raise UserError("--report with --case reads the file of --json: give --json FILE too")
        json_files(args.report)
    file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
    case = import_module(f"benchmarks.{args.case}")
    run_of, own = _options(args, case.measure)
    record = case.measure(replace(case.DEFAULTS, **run_of, seed=args.seed, progress=True, file=file), **own)
    print(table(record))
    if file is not None:
        write_json(file.path, record)
    if args.report is not None:
        _report([*args.report, args.json], args.out)
    return 0 if record["complete"] else EXIT_INTERRUPTED


def _options(args: Namespace, measure: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that were given: those of a `cases.Run`, and those of the case itself."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device: use --device cpu")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: value for name, value in vars(args).items() if value is not None}
    run_of: dict[str, Any] = {name: given[name] for name in ("rounds", "seconds", "threads") if name in given}
    run_of["device"] = found if args.device == "auto" else args.device
    own = {name: given[name] for name in _OF_CASES if name in given}
    for name in own.keys() - inspect.signature(measure).parameters:
        raise UserError(f"{_OF_CASES[name]} does not go with the case {args.case!r}: leave it out")
    return run_of, own


def table(record: Record) -> str:
    """Return the record of a case for people: rates, ratio with its interval, and where a step goes."""
    return case_tables.table(record, CASES[record["case"]])


def lines_of_tables(record: Record) -> list[str]:
    """Return the table and the command of a record whose case has a table of its own."""
    case = record["case"]
    if case not in ("side_by_side", "row_profile", "by_itself"):
        return []
    return [import_module(f"benchmarks.{case}").COMMAND.table(record), f"`{command_of(record)}`"]


def _report(paths: list[str], out: str | None) -> int:
    from fastpack_trl.bench.command import report

    return report(paths, out, more=lines_of_tables)


if __name__ == "__main__":
    raise SystemExit(main())
