"""``fastpack-trl bench``: measures stock against fastpack on this machine; a table for people, JSON for machines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.headline_table import gain_lines, tiny_lines
from fastpack_trl.bench import config_run
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.tables import (
    aligned,
    attention_lines,
    disturbances,
    model_lines,
    moe_lines,
    offload_lines,
    overhead_lines,
    skipped,
)

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def add_arguments(parser: ArgumentParser) -> None:
    """Options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    add("--case", metavar="NAME", help=f"what to measure: {', '.join(CASES)}")
    add("--list", action="store_true", help="list the cases and stop")
    add(
        "--json",
        metavar="FILE",
        help="write every figure, every single time, settings and versions to FILE, row by row; rows that the same run "
        "(case, settings, versions, commit, device) has finished there are taken over, another run's file is an error; "
        "with --config the whole run is, once it is finished",
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
    add(
        "--scale",
        choices=("tiny", "full"),
        help="headline: full (public shapes, needs a large GPU; the default on CUDA) or tiny (the same rows with tiny "
        "models of the same families; the default elsewhere)",
    )
    add("--rows", metavar="NAME", nargs="+", help="headline: only these rows, e.g. qwen3-14b-qlora")
    add("--tokens", metavar="N", nargs="+", type=int, help="row lengths in tokens (default: those of the case)")
    add("--pairs", metavar="N", type=int, help="timed pairs (rounds) per row; 6 or more for an interval of 95 %%")
    add("--quick", action="store_true", help="fewer row lengths under TRL's defaults (minutes instead of tens)")
    add(
        "--seconds",
        metavar="S",
        type=float,
        help="time for the whole call (default: 480): attention, lora, moe, activation_memory, headline, and "
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
        help="CPU threads of torch (default: 2; moe, host_overhead, collator: 1; with --config: torch's own)",
    )
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where torch sees it, else the CPU"
    )
    add("--seed", metavar="N", type=int, help="of weights, documents and order (default: 0; with --config: the YAML's)")
    config_run.add_arguments(parser)


def run(args: Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, also where fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: no or an unknown case, an option that the case does not have, a JSON path that cannot be written.
    """
    if getattr(args, "config", None) is not None:
        return config_run.run(args, _facts)
    if config_run.given(args):
        raise UserError(f"{config_run.given(args)[0]} goes with --config FILE only: a case has no trainer of yours")
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
        raise UserError(f"no case: give --case, one of {', '.join(CASES)}, or --config FILE for a run of your own")
    if args.case not in CASES:
        raise UserError(f"there is no case {args.case!r}{did_you_mean(args.case, CASES)} (cases: {', '.join(CASES)})")
    if args.case != "headline" and (args.scale is not None or args.rows is not None):
        raise UserError("--scale and --rows go with --case headline: leave them out")
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


def _report(paths: list[str], out: str | None) -> int:
    from fastpack_trl.bench.report import DEFAULT_FOLDER, write_report

    if not paths:
        raise UserError("--report has no file: name JSON files of fastpack-trl bench, or a folder with some")
    first, *pictures = write_report(paths, out or DEFAULT_FOLDER)
    print(f"\n{first}: tables, and {len(pictures)} plots beside it")
    return 0


def _check_report(args: Namespace) -> None:
    """What would make the report fail after the measurement."""
    from fastpack_trl.bench.plots import require_matplotlib
    from fastpack_trl.bench.report import json_files

    require_matplotlib()
    if args.json is None:
        raise UserError("--report with --case reads the file of --json: give --json FILE too")
    json_files(args.report)


def table(record: Mapping[str, Any]) -> str:
    """The record for people: rates, ratio with its interval, and where a step goes."""
    rows = record["rows"]
    out = [f"{record['case']}: {CASES[record['case']].help}", *_facts(record)]
    if not record["complete"]:
        out.append(f"INCOMPLETE: interrupted; {len(rows)} row(s) were finished")
    if record["case"] == "attention":
        return "\n".join([*out, *attention_lines(rows)])
    if record["case"] == "moe":
        return "\n".join([*out, *moe_lines(rows)])
    if record["case"] == "host_overhead":
        return "\n".join([*out, *overhead_lines(rows)])
    if record["case"] == "headline":
        return "\n".join([*out, *model_lines(rows), *offload_lines(rows), *gain_lines(rows), *tiny_lines(record)])
    if record["case"] == "activation_memory":
        return "\n".join([*out, *model_lines(rows), *offload_lines(rows)])
    if any("sides" in row for row in rows):
        return "\n".join([*out, *model_lines(rows)])
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells = _rate_cells(row for row in chosen if "skipped" not in row)
        out += ["", setting, *(aligned(cells) if len(cells) > 1 else []), *skipped(chosen), *disturbances(chosen)]
    phased = [row for row in rows if "phases" in row.get("fastpack", {})]
    if phased:
        out += ["", "where a step goes (median ms)", *aligned(_phase_cells(phased))]
    return "\n".join(out)


def _facts(record: Mapping[str, Any]) -> list[str]:
    machine, source = record["machine"], record["source"]
    device = machine.get("gpu") or machine["processor"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    commit = "installed package"
    if source["commit"] is not None:
        commit = f"commit {source['commit'][:12]}{' with uncommitted changes' if source['modified'] else ''}"
    threads = machine["threads"]
    return [
        f"{device}{driver}, {threads} thread{'s' * (threads != 1)} of {machine['cores']} cores, {record['date']}",
        versions,
        f"{commit}, seed {record['seed']}",
    ]


def _rate_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells = [["tokens", "path", "stock tok/s", "fastpack tok/s", "ratio", "interval"]]
    for row in rows:
        ratio = row["ratio"]
        cells.append(
            [
                f"{row['tokens']:,}",
                row["path"],
                f"{row['stock']['tokens_per_second']['median']:,.0f}",
                f"{row['fastpack']['tokens_per_second']['median']:,.0f}",
                f"{ratio['median']:.2f}x",
                f"{ratio['low']:.2f} to {ratio['high']:.2f} ({ratio['coverage']:.1%})",
            ]
        )
    return cells


def _phase_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells: list[list[str]] = []
    for row in rows:
        for side in ("stock", "fastpack"):
            phases = row[side]["phases"]
            cells = cells or [["tokens", "setting", "side", *phases]]
            cells.append(
                [f"{row['tokens']:,}", row["setting"], side, *(f"{seconds * 1000:,.1f}" for seconds in phases.values())]
            )
    return cells
