"""``python -m benchmarks``: the in-house cases; a table for people, JSON for machines. Runs in a checkout."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.one_line import in_one_line
from fastpack_trl.bench.command import EXIT_INTERRUPTED
from fastpack_trl.cli.main import CommandParser
from fastpack_trl.errors import UserError, did_you_mean

PROG = "python -m benchmarks"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options; imports nothing heavy."""
    add = parser.add_argument
    add("--case", metavar="NAME", help=f"what to measure: {', '.join(CASES)}")
    add("--list", action="store_true", help="list the cases and stop")
    add(
        "--json",
        metavar="FILE",
        help="write every figure, every single time, settings and versions to FILE, row by row; rows that the same run "
        "(case, settings, versions, commit, device) has finished there are taken over, another run's file is an error",
    )
    add("--again", action="store_true", help="measure every row anew and replace the FILE of --json")
    add(
        "--report",
        metavar="FILE",
        nargs="*",
        help="Markdown tables and plots from these JSON files, or from the folders they lie in (default: the FILE of "
        "--json); measures nothing without --case",
    )
    add("--out", metavar="DIR", help="folder of the report (default: bench-report)")
    add("--tokens", metavar="N", nargs="+", type=int, help="row lengths in tokens (default: those of the case)")
    add("--pairs", metavar="N", type=int, help="timed pairs (rounds) per row; 6 or more for an interval of 95 %%")
    add("--quick", action="store_true", help="fewer row lengths under TRL's defaults (minutes instead of tens)")
    add(
        "--seconds",
        metavar="S",
        type=float,
        help="time for the whole call (default: 480): attention, lora, moe, activation_memory, and "
        "packed_attention with --model; what finds no time is named",
    )
    add(
        "--model",
        metavar="NAME",
        nargs="+",
        help="public shapes with random weights. packed_attention (beside stock, and beside metadata rebuilt in each "
        "layer): qwen3-0.6b, llama-3.2-1b, gpt-oss-20b, small; lora: qwen3-0.6b, qwen3-8b, qwen3-14b, small; "
        "activation_memory: qwen3-8b, qwen3-14b, qwen3-32b, small; moe: gpt-oss-20b, qwen3-30b-a3b, gpt_oss-small, "
        "qwen3_moe-small",
    )
    add("--backends", metavar="NAME", nargs="+", help="attention: only these, e.g. varlen per_document sdpa flex")
    add(
        "--layers",
        metavar="N",
        type=int,
        help="of the models of --model, or of the case: only the first N decoder layers (stated in the row)",
    )
    add(
        "--no-checkpointing",
        action="store_true",
        help="packed_attention with --model, lora, moe: no gradient checkpointing on any side",
    )
    add(
        "--liger",
        action="store_true",
        help="lora: Liger's kernels in the compiled stock side (CUDA, liger-kernel installed)",
    )
    add(
        "--threads",
        metavar="N",
        type=int,
        help="CPU threads of torch (default: 2; moe, host_overhead, collator: 1)",
    )
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where torch sees it, else the CPU"
    )
    add("--seed", metavar="N", type=int, help="of weights, documents and order (default: 0)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, as `fastpack_trl.cli.main.main` does."""
    parser = CommandParser(prog=PROG, description="The in-house cases of fastpack-trl.", allow_abbrev=False)
    add_arguments(parser)
    return in_one_line(PROG, lambda: run(parser.parse_args(argv)))


def run(args: Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, also where fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: no or an unknown case, an option that the case does not have, a JSON path that cannot be written.
    """
    args.seed = getattr(args, "seed", None) or 0
    if args.list:
        width = max(map(len, CASES))
        print("\n".join(f"{name.ljust(width)}  {case.help}" for name, case in CASES.items()))
        return 0
    if args.out is not None and args.report is None:
        raise UserError("--out names the folder of a report: give --report too")
    if args.report is not None and args.case is None:
        return _report(args.report, args.out)
    if args.case is None:
        raise UserError(f"no case: give --case, one of {', '.join(CASES)}; a run of your own: fastpack-trl bench")
    if args.case not in CASES:
        raise UserError(f"there is no case {args.case!r}{did_you_mean(args.case, CASES)} (cases: {', '.join(CASES)})")
    if args.case != "lora" and args.liger:
        raise UserError("--liger goes with --case lora: leave it out")
    from fastpack_trl.measure.record import check_writable, write_json

    if args.report is not None:
        _check_report(args)
    file: Path | None = check_writable(args.json) if args.json else None
    record = CASES[args.case].measure(args)
    print(table(record))
    if file is not None:
        write_json(file, record)
    if args.report is not None:
        _report([*args.report, *([] if file is None else [str(file)])], args.out)
    return 0 if record["complete"] else EXIT_INTERRUPTED


def table(record: Mapping[str, Any]) -> str:
    """Return the record for people: rates, ratio with its interval, and where a step goes."""
    from benchmarks import case_tables

    return case_tables.table(record, CASES[record["case"]].help)


def lines_of_tables(record: Mapping[str, Any]) -> list[str]:
    """Return the table and the command of a record whose case has a table of its own."""
    from benchmarks import by_itself_table, profile_table, side_table
    from benchmarks.record_commands import command_of

    tables = {"side_by_side": side_table, "row_profile": profile_table, "by_itself": by_itself_table}
    made = tables.get(record["case"])
    return [] if made is None else [made.table(record), f"`{command_of(record)}`"]


def _report(paths: list[str], out: str | None) -> int:
    from fastpack_trl.bench.command import report

    return report(paths, out, more=lines_of_tables)


def _check_report(args: Namespace) -> None:
    """Raise what would make the report fail after the measurement."""
    from fastpack_trl.bench.canvas import require_matplotlib
    from fastpack_trl.bench.report import json_files

    require_matplotlib()
    if args.json is None:
        raise UserError("--report with --case reads the file of --json: give --json FILE too")
    json_files(args.report)
