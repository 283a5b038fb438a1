"""``python -m benchmarks several_gpus --gpus 8``: speed per GPU from one GPU to all of them.

*Weak*: each GPU has one row per step. *Strong*: a step has as many rows as there are GPUs at most, which fewer GPUs
compute one after the other. Efficiency is the speed per GPU over that of one GPU. *waits*: share of a step in which a
GPU does nothing but exchange with the others or wait for them. In rows named *uneven*, a row is one document of 16,384
tokens or four of 4,096, in random order.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from benchmarks import Parser, known_names
from benchmarks.records import append, facts_of
from benchmarks.rows import PAIR, ROWS
from benchmarks.run import SIDES, launcher, steps_of

SCALED = (
    "ddp qwen3-0.6b lora 2048", "fsdp2 qwen3-8b lora 4096", "fsdp2 qwen3-8b full 4096",
    "fsdp2 qwen3-30b-a3b experts 4096", "ddp images qwen2.5-vl-3b lora 4", "ddp uneven 16384",
)  # fmt: skip
COLUMNS = "row", "side", "GPUs", "weak, ms", "efficiency", "strong, ms", "efficiency", "waits", "peak, GiB"


def counts_up_to(gpus: int) -> list[int]:
    """Return 1, 2, 4, ... and `gpus`."""
    return sorted({*(1 << k for k in range(gpus.bit_length())), gpus})


def measure(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of each run: for each number of GPUs each side, weak and strong."""
    about = facts_of(args, [])
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as caches:
        for name in args.rows:
            row = ROWS[name]
            for count in counts_up_to(args.gpus):
                # One row each is both on the largest number of GPUs; images have no rows to accumulate.
                many = {"weak": 1, "strong": -(-args.gpus // count)}
                for kind, rows in many.items() if row.batch is None and count < args.gpus else [("weak", 1)]:
                    for side in args.sides:
                        process = Namespace(**vars(args) | {"processes": count})
                        options = {"steps": steps_of(row, args.steps), "profiled": 3}
                        launch = launcher(row, side, process, f"{caches}/{side}", **options)
                        found = launch({"row": name, "accumulated": rows}, side)
                        key = {"case": "scaling", "row": name, "side": side, "scaling": kind, "processes": count}
                        yield {**key, "round": 0, **found, **about}


def table_of(records: Sequence[dict[str, Any]]) -> str:
    """Return times, efficiency, waits and memory by row, side and number of GPUs."""
    found = {(r["row"], r["side"], r["processes"], r["scaling"]): r for r in records}
    most = max((r["processes"] for r in records), default=1)

    def seconds(*key: Any) -> float | None:
        run = found.get(key, {})
        return fmean(run["seconds"]) if "seconds" in run else None

    lines = [" | ".join(COLUMNS)]
    for row, side, count in dict.fromkeys((r["row"], r["side"], r["processes"]) for r in records):
        weak = seconds(row, side, count, "weak")
        strong = weak if count == most else seconds(row, side, count, "strong")
        one = [seconds(row, side, 1, kind) for kind in ("weak", "strong")]
        cells = [row, side, str(count)]
        for now, first, share in ((weak, one[0], 1), (strong, one[1], count)):
            cells += [f"{1e3 * now:,.1f}" if now else "-", f"{first / now / share:.0%}" if now and first else "-"]
        run = found.get((row, side, count, "weak"), {})
        alone, peak = run.get("profile", {}).get("exposed_seconds"), run.get("peak_gib")
        cells += [f"{alone / weak:.0%}" if weak and alone is not None else "-", f"{peak:.1f}" if peak else "-"]
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def parse(words: Sequence[str]) -> Namespace:
    """Return the options."""
    parser = Parser("several_gpus", __doc__, f"rows: {', '.join(n for n, row in ROWS.items() if row.engine)}")
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="the largest number of GPUs, or of processes on a CPU")
    add("--rows", nargs="+", default=SCALED, metavar="ROW", help="default: those of the page")
    add("--sides", nargs="+", default=PAIR, metavar="SIDE", help="default: trl fastpack")
    add("--steps", type=int, help="least timed steps")
    add("--timeout", type=float, default=900, help="seconds of one run (default: %(default)s)")
    args = parser.measurement(words, threads=min(8, torch.get_num_threads()))
    args.rows = known_names("row", args.rows, [name for name, row in ROWS.items() if row.engine])
    args.sides = known_names("side", args.sides, SIDES)
    return args


def report(args: Namespace) -> int:
    """Measure and print the table; 1 if a run failed."""
    records: list[dict[str, Any]] = []
    for run in measure(args):
        records.append(run)
        append(args.json, run)
        said = run.get("failed") or f"{1e3 * fmean(run['seconds']):,.1f} ms a step"
        print(f"{run['row']}, {run['side']}, {run['processes']}, {run['scaling']}: {said}", file=sys.stderr)
    print(table_of(records))
    return int(any("failed" in run for run in records))
