"""Whole training with LoRA over a base as loaded and in FP8: fastpack at its defaults otherwise, one process per side.

The runs are those of `benchmarks.side_by_side`. FP8 changes what is computed: how far the losses are apart is in the
table, and says nothing about learning (`benchmarks.fp8_accuracy` does).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import OURS, OURS_FP8, measure
from benchmarks.side_table import Cell, cells, loss_difference, peak_cell
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.bench.views import device_of
from fastpack_trl.measure.record import check_writable

ROWS = ("qwen3-8b lora 4096", "qwen3-14b nf4 4096", "qwen3-8b lora 8192", "qwen3-14b lora 4096", "qwen3-0.6b lora 8192")
"""In the order in which they are measured: what the decision needs first."""
WORTH = 1.2
"""Ratio of tokens per second from which the feature is worth having."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row and side, and whether FP8 is worth it."""
    columns = ["row", "base", "tokens/s", "quartiles", "over as loaded", "loss apart", "kernels, ms", "peak, GiB"]
    columns += ["activations", "frozen base"]
    torch = record["versions"]["torch"]
    said = (
        f"**LoRA over a base in FP8, {device_of(record)}, torch {torch}.** *peak*: of tensors, + CUDA graphs beside it."
    )
    lines = [said, "", f"| {' | '.join(columns)} |"]
    lines.append("| --- | --- " + "| ---: " * 6 + "| --- | --- |")
    for row, sides in cells(record).items():
        for side in (OURS, OURS_FP8):
            if side in sides:
                lines.append(f"| {row} | {' | '.join(_cells(side, sides.get(OURS), sides[side]))} |")
    return "\n".join([*lines, "", *_decisions(record)])


def _cells(side: str, loaded: Cell | None, cell: Cell) -> Iterator[str]:
    yield "FP8" if side == OURS_FP8 else "as loaded"
    if not cell.runs:
        yield cell.failed or "-"
        yield from ["-"] * 7
        return
    run = cell.runs[0]
    yield f"{cell.rate:,.0f}"
    yield " to ".join(f"{each:,.0f}" for each in cell.quartiles)
    both = loaded is not None and bool(loaded.runs) and side == OURS_FP8
    yield f"{cell.rate / loaded.rate:.2f}" if both and loaded is not None else "-"
    apart = loss_difference(loaded, cell) if both and loaded is not None else None
    yield "-" if apart is None else f"{apart:.1e}"
    yield f"{1000 * run['profile']['busy_seconds']:,.0f}" if run["profile"] else "-"
    yield peak_cell(cell.runs)
    features = run["report"]["features"]
    yield str(features.get("activation_memory", {}).get("path", "-"))
    yield str(features.get("frozen_base", {}).get("reason", "-")).partition(":")[0]


def _decisions(record: Mapping[str, Any]) -> Iterator[str]:
    for row, sides in cells(record).items():
        loaded, fp8 = sides.get(OURS), sides.get(OURS_FP8)
        if loaded is not None and fp8 is not None and loaded.runs and fp8.runs:
            ratio = fp8.rate / loaded.rate
            yield f"{row}: at least {WORTH:g}x: {'yes' if ratio >= WORTH else 'no'} ({ratio:.2f})  "


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.fp8_steps``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_steps", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"of benchmarks.side_by_side ({', '.join(ROWS)})")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all runs; the next command goes on")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
    parser.add_argument("--again", action="store_true", help="measure anew what FILE has")
    parser.add_argument("--report", metavar="FILE", help="print the table of a record and stop")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.report is not None:
        print(table(json.loads(Path(args.report).read_text(encoding="utf-8"))))
        return
    file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
    record = measure(
        args.rows, (OURS, OURS_FP8), rounds=args.rounds, seed=args.seed, seconds=args.seconds, file=file,
        case="fp8_steps",
    )  # fmt: skip
    if file is not None:
        file.save(record)
    print(table(record))


if __name__ == "__main__":
    main()
