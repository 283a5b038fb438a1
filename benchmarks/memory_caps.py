"""Largest row and tokens per second where a GPU has less memory: one process per model and side, all caps in it.

A cap limits torch's allocator to what a device of that size leaves beside CUDA's context. The largest row of each cap
is predicted from rows that are run without one, then run, and one step longer and shorter. Stock trains with gradient
checkpointing, ours by its plan. Public shapes with random weights, packed rows of documents of
2,048 tokens. A file of ``--json`` is written after each process, and gone on with by the same command.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.caps_search import STEP
from benchmarks.caps_side import OURS, ROOM, SIDES, STEPS, WORKLOADS
from benchmarks.command import CaseCommand
from benchmarks.training_side import device_here
from fastpack_trl.bench.report import read_record
from fastpack_trl.bench.result_file import ResultFile, run_rows
from fastpack_trl.bench.training_run import OwnProcess, TrainingRun
from fastpack_trl.measure.tables import aligned, fact_lines

CASE = "memory_caps"
CAPS_GIB = (16.0, 24.0, 48.0, 80.0)
LONGEST = 131_072
"""Tokens of a row: the longest context of these models."""
PROBES = (2048, 4096, 8192)
SECONDS = 90.0
"""For the rows of one process; its model is built before."""
_BUILD_SECONDS = 180.0
LARGE = tuple(WORKLOADS)[:4]


def measure(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    """Measure each side of each model in a process of its own, ours last: it is timed at stock's largest rows too.

    Returns:
        A record. A row has the model as ``row``, its ``side``, and what `caps_side.measure_side` returns, or
        ``failed``.

    Raises:
        UserError: `file` holds another run.
    """
    known = file is not None and not file.again and file.path.exists()
    done = sides_of(read_record(file.path)) if file is not None and known else {}

    def launch(row: Mapping[str, Any], side: str) -> dict[str, Any]:
        sides = done.setdefault(row["row"], {})
        options = {
            "caps": sorted(args.caps), "beside": largest_of(sides.get("stock", {})) if side == OURS else {},
            "longest": args.longest, "probes": args.probes, "seconds": args.seconds, "seed": args.seed,
        }  # fmt: skip
        timeout = args.seconds + _BUILD_SECONDS
        found = OwnProcess("benchmarks.caps_side:measure_side", options, notes=True, timeout=timeout)(row, side)
        sides[side] = found
        return found

    sides = sorted(args.sides, key=list(SIDES).index)
    runs = [TrainingRun({"row": name}, side, launch) for name in args.rows for side in sides]
    return run_rows(
        runs, case=CASE, settings=settings(args), device=device_here(), threads=torch.get_num_threads(),
        seed=args.seed, file=file, progress=True,
    )  # fmt: skip


def sides_of(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what each side has found, by model; a row of an older record has all sides of one."""
    found: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        found.setdefault(row.get("model") or row["row"], {}).update(row.get("sides") or {row["side"]: row})
    return found


def settings(args: Namespace) -> dict[str, Any]:
    """Return the caps, and how rows are looked for."""
    return {
        "caps_gib": sorted(args.caps), "longest": args.longest, "probes": args.probes, "seconds": args.seconds,
        "steps": STEPS, "resolution": STEP, "room": ROOM,
    }  # fmt: skip


def largest_of(found: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a side's largest row by cap, where it has one."""
    return {cap: tokens for cap, tokens in found.get("largest", {}).items() if tokens}


def table(record: Mapping[str, Any]) -> str:
    """Return the record for people: largest rows, rates and memory by model, cap and side."""
    out = [f"{CASE}: largest packed row under a cap of device memory", *fact_lines(record)]
    out += [] if record["complete"] else ["INCOMPLETE: some processes have not run"]
    out += ["a row in brackets is predicted: there was no time to run it"]
    for model, sides in sides_of(record).items():
        out += ["", model, *lines(sides)]
    return "\n".join(out)


def lines(sides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of one model."""
    head = "GiB, side, largest row, of stock's, tok/s, at stock's row, peak, reserved, attention, plan"
    cells, notes = [head.split(", ")], []
    stock = largest_of(sides.get("stock", {}))
    for side, found in sides.items():
        notes += [f"{side}: {why}" for why in (found.get("failed"), found.get("skipped")) if why]
        for cap, tokens in found.get("largest", {}).items():
            if why := found.get("too_small", {}).get(cap):
                notes.append(f"{side}, {cap} GiB: does not fit: {why}")
                continue
            rows = [one for one in found["rows"] if one["cap_gib"] == float(cap)]
            best, timed = _row(rows, tokens), _row(rows, stock.get(cap))
            beside = f"{tokens / stock[cap]:.2f}x" if tokens and cap in stock else "-"
            cells.append([cap, side, _largest(found, cap, rows), beside])
            cells[-1] += [_figure(best, "tokens_per_second", ",.0f"), _figure(timed, "tokens_per_second", ",.0f")]
            cells[-1] += [_figure(best, "peak_gib", ".1f"), _figure(best, "reserved_gib", ".1f")]
            cells[-1] += [best.get("attention", "-"), _plan(best.get("plan"))]
            notes += [f"{side}, {cap} GiB, {one['tokens']:,} tokens: {_why(one)}" for one in rows if _why(one)]
    return [*(aligned(cells) if len(cells) > 1 else []), *notes]


def _largest(found: Mapping[str, Any], cap: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tokens of the largest row; in brackets those that are predicted, where there was no time to run it."""
    if tokens := found["largest"][cap]:
        return f"{tokens:,}"
    predicted = found.get("predicted", {}).get(cap)
    return f"({predicted:,})" if predicted and any("skipped" in row for row in rows) else "none"


def _row(rows: Sequence[Mapping[str, Any]], tokens: int | None) -> Mapping[str, Any]:
    """Return the row of so many tokens that was timed, the last one where there are several; empty if there is none."""
    timed = [row for row in rows if row["tokens"] == tokens and row.get("tokens_per_second")]
    return timed[-1] if timed else {}


def _figure(row: Mapping[str, Any], key: str, form: str) -> str:
    return "-" if row.get(key) is None else format(row[key], form)


def _plan(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return "-"
    measured = "" if plan["measured_gib"] is None else f", measured {plan['measured_gib']:.1f}"
    return f"{plan['text'].partition(';')[0]}: predicted {plan['predicted_gib']:.1f}{measured}"


def _why(row: Mapping[str, Any]) -> str:
    """Return what is to be said of a row that ended early, or ran out of memory and went on."""
    again = (row.get("plan") or {}).get("ran_again")
    return str(row.get("failed") or row.get("skipped") or again or "")


def add_options(parser: ArgumentParser) -> None:
    """Add the caps, and what limits the search."""
    add = parser.add_argument
    add("--caps", type=float, nargs="+", default=list(CAPS_GIB), help="GiB (default: %(default)s)")
    add("--longest", type=int, default=LONGEST, help="tokens of a row at most (default: %(default)s)")
    add("--probes", type=int, nargs="+", default=list(PROBES), help="rows of the prediction, tokens")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=WORKLOADS, default_rows=LARGE, sides=SIDES,
    seconds=SECONDS, record=measure, table=table, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
