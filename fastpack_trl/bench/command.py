"""``fastpack-trl bench``: stock beside fastpack on a run of your own; a table for people, JSON for machines."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fastpack_trl.bench import config_run
from fastpack_trl.errors import UserError

CASES_COMMAND = "python -m benchmarks"


class MovedToBenchmarks(Action):
    """An option of the in-house cases: says where they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        """Raise `UserError` with the command."""
        command = " ".join([CASES_COMMAND, str(option_string), *([str(values)] if values else [])])
        here = (Path(__file__).resolve().parents[2] / "benchmarks" / "__main__.py").is_file()
        without = "" if here else " (this is an installed package without them: clone the repository)"
        raise UserError(f"the in-house cases are no part of the package; in a checkout: {command}{without}")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    cases = f"the in-house cases are in benchmarks/ of the repository: `{CASES_COMMAND} --list` in a checkout"
    add("--case", metavar="NAME", nargs="?", action=MovedToBenchmarks, help=cases)
    add("--list", nargs=0, action=MovedToBenchmarks, help="as --case")
    add(
        "--json",
        metavar="FILE",
        help="write every figure, every single time, settings and versions to FILE once the run is finished; a "
        "finished run in FILE is taken over if it is the same (config, settings, versions, commit, device), another "
        "run's file is an error",
    )
    add("--again", action="store_true", help="measure anew and replace the FILE of --json")
    add(
        "--report",
        metavar="FILE",
        nargs="*",
        help="Markdown tables and plots from these JSON files, or from the folders they lie in; measures nothing",
    )
    add("--out", metavar="DIR", help="folder of the report (default: bench-report)")
    add("--pairs", metavar="N", type=int, help="timed pairs (rounds) of steps; 6 or more for an interval of 95 %%")
    add("--threads", metavar="N", type=int, help="CPU threads of torch (default: torch's own)")
    add("--seed", metavar="N", type=int, help="of weights, data and order (default: the YAML's)")
    config_run.add_arguments(parser)


def run(args: Namespace) -> int:
    """Measure a config, or write a report of JSON files.

    Returns:
        0, also where fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: nothing asked for, options that do not go together, a file that cannot be read or written.
    """
    if args.config is not None:
        return config_run.run(args)
    if config_run.given(args):
        raise UserError(f"{config_run.given(args)[0]} goes with --config FILE only")
    if args.report is not None:
        return report(args.report, args.out)
    if args.out is not None:
        raise UserError("--out names the folder of a report: give --report too")
    raise UserError(
        "nothing to measure: give --config FILE for a run of your own, or --report FILE for tables and plots; the "
        f"in-house cases: {CASES_COMMAND} --list in a checkout"
    )


def report(
    paths: list[str], out: str | None, more: Callable[[Mapping[str, Any]], list[str]] = lambda record: []
) -> int:
    """Write the report of JSON files (`write_report`) and print its name."""
    from fastpack_trl.bench.report import DEFAULT_FOLDER, write_report

    if not paths:
        raise UserError("--report has no file: name JSON files of fastpack-trl bench, or a folder with some")
    first, *pictures = write_report(paths, out or DEFAULT_FOLDER, more)
    print(f"\n{first}: tables, and {len(pictures)} plots beside it")
    return 0
