"""Largest row and tokens per second where a GPU has less memory: one process per model and side, all caps in it.

A cap limits torch's allocator to what a device of that size leaves beside CUDA's context. The largest row of each cap
is predicted from rows that are run without one, then run, and one step longer and shorter. Stock trains with gradient
checkpointing, and with TRL's offload; ours by its plan. Public shapes with random weights, packed rows of documents of
2,048 tokens. A file of ``--json`` is written after each process, and gone on with by the same command.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.caps_search import STEP
from benchmarks.caps_side import OURS, ROOM, SIDES, STEPS, measure_side
from benchmarks.captured import Row
from benchmarks.one_line import in_one_line, record_of
from benchmarks.own_process import answer_of
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import check_writable, date_now, make_record, write_json
from fastpack_trl.measure.tables import aligned, fact_lines

CASE = "memory_caps"
CAPS_GIB = (16.0, 24.0, 48.0, 80.0)
LONGEST = 131_072
"""Tokens of a row: the longest context of these models."""
PROBES = (2048, 4096, 8192)
SECONDS = 90.0
"""For the rows of one process; its model is built before."""
_BUILD_SECONDS = 180.0
DEFAULT_SIDES = ("stock", "stock_offload", OURS)
WORKLOADS = {
    "qwen3-8b": Row("qwen3-8b", 0, "lora"), "qwen3-8b-nf4": Row("qwen3-8b", 0, "nf4"),
    "qwen3-14b-nf4": Row("qwen3-14b", 0, "nf4"), "gpt-oss-20b-nf4": Row("gpt-oss-20b", 0, "nf4-experts", 24),
    "tiny": Row("tiny-qwen3", 0, "lora"), "tiny-gpt-oss": Row("tiny-gpt-oss", 0, "nf4-experts"),
}  # fmt: skip
"""By the name on the command line: LoRA r=16 on all projections; of the mixture of experts on the attention, with the
frozen expert stacks in four bits, which stock can train too."""
LARGE = tuple(WORKLOADS)[:4]


def measure(
    names: Sequence[str], *, caps: Sequence[float], sides: Sequence[str] = DEFAULT_SIDES, longest: int = LONGEST,
    probes: Sequence[int] = PROBES, seconds: float = SECONDS, seed: int = 0, file: ResultFile | None = None,
    progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Measure each side of each model in a process of its own, ours last: it is timed at stock's largest rows too.

    Returns:
        A record. A row has ``model`` and ``sides``, of each what `measure_side` returns, or ``failed``.

    Raises:
        UserError: an unknown model or side; `file` holds another run.
    """
    known: tuple[str, ...]
    for name, known in [*((name, tuple(WORKLOADS)) for name in names), *((side, tuple(SIDES)) for side in sides)]:
        if name not in known:
            raise UserError(f"there is no {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    settings = {
        "caps_gib": sorted(caps), "longest": longest, "probes": list(probes), "seconds": seconds, "steps": STEPS,
        "resolution": STEP, "room": ROOM,
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = make_record(
        case=CASE, settings=settings, rows=(), complete=False, device=device, threads=torch.get_num_threads(), seed=seed
    )
    done = {row["model"]: row for row in ([] if file is None else file.finished(head))}
    record = {**head, "rows": list(done.values())}
    for name in names:
        row = done.setdefault(name, {"model": name, "sides": {}})
        for side in sorted(sides, key=list(SIDES).index):
            if row["sides"].get(side, {}).get("complete"):
                continue
            beside = largest_of(row["sides"].get("stock", {})) if side == OURS else {}
            task = {
                "caps": sorted(caps), "beside": beside, "longest": longest, "probes": list(probes), "seconds": seconds,
                "seed": seed,
            }  # fmt: skip
            row["sides"][side] = _in_a_process(name, side, task)
            record |= {"date": date_now(), "rows": list(done.values())}
            if file is not None:
                file.save(record)
            if progress:
                print("\n".join([f"{name}, {side}", *lines(row, only=side)]), flush=True)
    return record | {"complete": True}


def largest_of(found: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a side's largest row by cap, where it has one."""
    return {cap: tokens for cap, tokens in found.get("largest", {}).items() if tokens}


def _in_a_process(name: str, side: str, task: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        asked = Path(folder) / "task.json"
        write_json(asked, task)
        arguments = (name, "--side", side, "--task", asked)
        found = answer_of("benchmarks.memory_caps", arguments, task["seconds"] + _BUILD_SECONDS)
        return found if found.get("complete") else {"failed": "it ended before its last row", **found}


def _measure_here(name: str, side: str, asked: Path, answer: Path) -> None:
    """Measure one side in this process; what there is of it is written after each row."""
    task = json.loads(asked.read_text(encoding="utf-8"))
    beside = {float(cap): tokens for cap, tokens in task["beside"].items()}
    latest: dict[str, Any] = {}

    def note(found: dict[str, Any]) -> None:
        latest.update(found)
        write_json(answer, latest)

    options = {key: task[key] for key in ("longest", "probes", "seed", "seconds")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, failure = attempt(
        lambda: measure_side(WORKLOADS[name], side, task["caps"], beside=beside, device=device, note=note, **options)
    )
    write_json(answer, {**latest, "failed": failure} if found is None else {**found, "complete": True})


def table(record: Mapping[str, Any]) -> str:
    """Return the record for people: largest rows, rates and memory by model, cap and side."""
    out = [f"{CASE}: largest packed row under a cap of device memory", *fact_lines(record)]
    out += [] if record["complete"] else ["INCOMPLETE: some processes have not run"]
    out += ["a row in brackets is predicted: there was no time to run it"]
    for row in record["rows"]:
        out += ["", row["model"], *lines(row)]
    return "\n".join(out)


def lines(row: Mapping[str, Any], only: str | None = None) -> list[str]:
    """Return the lines of one model."""
    head = [
        "GiB",
        "side",
        "largest row",
        "of stock's",
        "tok/s",
        "at stock's row",
        "peak",
        "reserved",
        "attention",
        "plan",
    ]
    cells, notes = [head], []
    stock = largest_of(row["sides"].get("stock", {}))
    for side, found in row["sides"].items():
        if only not in (None, side):
            continue
        notes += [f"{side}: {found['failed']}"] if "failed" in found else []
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.memory_caps``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_caps", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(WORKLOADS)} (default: the first 4)")
    parser.add_argument("--caps", type=float, nargs="+", default=list(CAPS_GIB), help="GiB (default: %(default)s)")
    parser.add_argument("--sides", nargs="+", default=list(DEFAULT_SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a row at most (default: %(default)s)")
    parser.add_argument("--probes", type=int, nargs="+", default=list(PROBES), help="rows of the prediction, tokens")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for the rows of a process (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
    parser.add_argument("--again", action="store_true", help="measure anew what FILE has")
    parser.add_argument("--report", metavar="FILE", help="print the table of a record and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side is not None:  # in the process of one side
        _measure_here(args.models[0], args.side, Path(args.task), Path(args.json))
        return
    if args.report is not None:
        print(table(record_of(args.report, CASE)))
        return
    file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
    record = measure(
        args.models or LARGE, caps=args.caps, sides=args.sides, longest=args.longest, probes=args.probes,
        seconds=args.seconds, seed=args.seed, file=file,
    )  # fmt: skip
    if file is not None:
        file.save(record)
    print(table(record))


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.memory_caps", main))
