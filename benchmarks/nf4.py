"""4-bit weights made dense: bitsandbytes' kernels beside one kernel, alone and before the product that reads them.

The sides take turns. On CUDA a call is a graph, replayed with a cold cache: the device alone.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.cases import Run, time_calls
from benchmarks.command import CaseCommand, Record
from benchmarks.readme_cells import ratio_cell
from fastpack_trl.bench.result_file import ResultFile, RowTask
from fastpack_trl.kernels.dequantise import dequantise_4bit
from fastpack_trl.measure.intervals import ratio_summary, summary

SHAPES = {
    "8b q, o": (4096, 4096), "8b k, v": (1024, 4096), "8b gate, up": (12288, 4096), "8b down": (4096, 12288),
    "14b q, o": (5120, 5120), "14b k, v": (1024, 5120), "14b gate, up": (17408, 5120), "14b down": (5120, 17408),
}  # fmt: skip
"""(out_features, in_features) of the projections of Qwen3, by model and name."""
STOCK, OURS, KEPT = "bitsandbytes", "fastpack", "kept dense"
TOKENS = (2048, 4096)


def measure(
    run: Run, shapes: Mapping[str, tuple[int, int]] = SHAPES, *, tokens: Sequence[int] = TOKENS, nested: bool = True
) -> dict[str, Any]:
    """Time both sides over every shape.

    Args:
        run: on the CPU the plain torch twin is in the kernel's place.
        shapes: (out_features, in_features) by name.
        tokens: rows of the products; each shape is also measured without one.
        nested: whether the scales are quantised themselves.

    Returns:
        A record; a row has ``sides`` with seconds of a call, and the bytes that a call has to move. Sides that differ
        make a row fail.
    """
    tasks = [
        RowTask(
            {"setting": f"{name} {shape[0]} x {shape[1]}", "tokens": count},
            partial(_row, run, shape, count, nested), {"sides": {}, "ratios": {}},
        )
        for name, shape in shapes.items() for count in (0, *tokens)
    ]  # fmt: skip
    return run.record("nf4", tasks, {"nested": nested, "dtype": "bfloat16"})


def _row(run: Run, shape: tuple[int, int], tokens: int, nested: bool, _seconds: float) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    device = run.device
    torch.manual_seed(run.seed)
    weight = torch.randn(shape, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    dense: dict[str, Callable[[], torch.Tensor]] = {
        STOCK: partial(dequantize_4bit, packed, state),
        OURS: partial(dequantise_4bit, packed, state),
    }
    kept = dense[STOCK]()
    assert torch.equal(kept, dense[OURS]()), "the sides differ"
    calls = dense
    if tokens:
        x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=device)
        calls = {side: partial(_product, x, make) for side, make in dense.items()}
        calls[KEPT] = lambda: F.linear(x, kept)
    seconds, _ = time_calls(calls, device, rounds=run.rounds)
    values = weight.numel()
    blocks = values // 64
    scales = blocks + 4 * -(-blocks // 256) if nested else 4 * blocks
    return {
        "bytes": values // 2 + scales + 2 * values,
        "sides": {side: {"seconds": summary(values)} for side, values in seconds.items()},
        "ratios": {side: ratio_summary(seconds[side], seconds[OURS]) for side in calls if side != OURS},
    }


def _product(x: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return F.linear(x, make())


def table(record: Record) -> str:
    """Return a line per shape and product: microseconds of each side, and how much faster ours is."""
    return "\n".join(map(_line, record["rows"]))


def _line(row: Mapping[str, Any]) -> str:
    what = f"F.linear of {row['tokens']:,} tokens" if row["tokens"] else "alone"
    if row.get("skipped"):
        return f"{row['setting']:26} {what:24} skipped: {row['skipped']}"
    parts = []
    for name, side in row["sides"].items():
        seconds = side["seconds"]["median"]
        rate = f", {row['bytes'] / seconds / 1e9:,.0f} GB/s" if not row["tokens"] else ""
        parts.append(f"{name} {seconds * 1e6:.1f} us{rate}")
    ratio = ratio_cell(row["ratios"][STOCK])
    return f"{row['setting']:26} {what:24} {'; '.join(parts)}; {STOCK}/{OURS} {ratio}"


def _record(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    shapes = {name: SHAPES[name] for name in args.rows}
    return measure(Run.of(args, file), shapes, tokens=args.tokens, nested=not args.flat)


def add_options(parser: ArgumentParser) -> None:
    """Add the rows of the products, and how scales are stored."""
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="rows of the products")
    parser.add_argument("--flat", action="store_true", help="scales in fp32 (default: quantised themselves)")


COMMAND = CaseCommand(case="nf4", help=__doc__, rows=SHAPES, rounds=15, record=_record, table=table, more=add_options)

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
