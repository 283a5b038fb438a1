"""4-bit weights made dense: bitsandbytes' kernels beside one kernel, alone and before the product that reads them.

The sides take turns. On CUDA a call is a graph, replayed with a cold cache: the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.cases import time_calls
from benchmarks.command import Record, in_one_line, measured, parse
from fastpack_trl.kernels.dequantise import dequantise_4bit, dequantise_4bit_torch
from fastpack_trl.measure.intervals import ratio_summary, summary
from fastpack_trl.measure.record import make_record

SHAPES = {
    "8b q, o": (4096, 4096), "8b k, v": (1024, 4096), "8b gate, up": (12288, 4096), "8b down": (4096, 12288),
    "14b q, o": (5120, 5120), "14b k, v": (1024, 5120), "14b gate, up": (17408, 5120), "14b down": (5120, 17408),
}  # fmt: skip
"""(out_features, in_features) of the projections of Qwen3, by model and name."""
STOCK, OURS, KEPT = "bitsandbytes", "fastpack", "kept dense"
TOKENS = (2048, 4096)


def measure(
    shapes: Mapping[str, tuple[int, int]], *, tokens: Sequence[int] = TOKENS, rounds: int = 15, nested: bool = True,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Time both sides over every shape.

    Args:
        shapes: (out_features, in_features) by name.
        tokens: rows of the products; each shape is also measured without one.
        rounds: turns of each side.
        nested: whether the scales are quantised themselves.
        device: ``cuda``, or ``cpu``, where the plain torch twin is in the kernel's place.
        seed: of weights and order.

    Returns:
        A record; a row has ``sides`` with seconds of a call, and the bytes that a call has to move.

    Raises:
        AssertionError: the sides differ.
    """
    rows = [
        _row(name, shape, count, rounds, nested, device, seed)
        for name, shape in shapes.items()
        for count in (0, *tokens)
    ]
    settings = {"rounds": rounds, "nested": nested, "dtype": "bfloat16"}
    return make_record(
        case="nf4", settings=settings, rows=rows, complete=True, device=device, threads=torch.get_num_threads(),
        seed=seed,
    )  # fmt: skip


def _row(
    name: str, shape: tuple[int, int], tokens: int, rounds: int, nested: bool, device: str, seed: int
) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

    torch.manual_seed(seed)
    weight = torch.randn(shape, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    code = get_4bit_type("nf4", device=device)
    cuda = device == "cuda"
    dense: dict[str, Callable[[], torch.Tensor]] = {
        STOCK: lambda: dequantize_4bit(packed, state),
        OURS: lambda: dequantise_4bit(packed, state) if cuda else dequantise_4bit_torch(packed, state, code),
    }
    kept = dense[STOCK]()
    assert torch.equal(kept, dense[OURS]()), f"{name}: the sides differ"
    calls = dense
    if tokens:
        x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=device)
        calls = {side: lambda make=make: F.linear(x, make()) for side, make in dense.items()}
        calls[KEPT] = lambda: F.linear(x, kept)
    seconds, _ = time_calls(calls, device, rounds=rounds)
    values = weight.numel()
    blocks = values // 64
    scales = blocks + 4 * -(-blocks // 256) if nested else 4 * blocks
    return {
        "setting": f"{name} {shape[0]} x {shape[1]}",
        "tokens": tokens,
        "bytes": values // 2 + scales + 2 * values,
        "sides": {side: {"seconds": summary(values)} for side, values in seconds.items()},
        "ratios": {side: ratio_summary(seconds[side], seconds[OURS]) for side in calls if side != OURS},
    }


def table(record: Record) -> str:
    """Return a line per shape and product: microseconds of each side, and how much faster ours is."""
    return "\n".join(map(_line, record["rows"]))


def _line(row: Mapping[str, Any]) -> str:
    what = f"F.linear of {row['tokens']:,} tokens" if row["tokens"] else "alone"
    parts = []
    for name, side in row["sides"].items():
        seconds = side["seconds"]["median"]
        rate = f", {row['bytes'] / seconds / 1e9:,.0f} GB/s" if not row["tokens"] else ""
        parts.append(f"{name} {seconds * 1e6:.1f} us{rate}")
    ratio = row["ratios"][STOCK]
    return (
        f"{row['setting']:26} {what:24} {'; '.join(parts)}; {STOCK}/{OURS} {ratio['median']:.2f} "
        f"({ratio['low']:.2f} to {ratio['high']:.2f})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m benchmarks.nf4``."""

    def options(parser: Any) -> None:
        parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="rows of the products")
        parser.add_argument("--flat", action="store_true", help="scales in fp32 (default: quantised themselves)")

    args = parse("nf4", __doc__, arguments, rows=list(SHAPES), rounds=15, extra=options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return measured(
        args, "nf4", lambda _: measure(
            {name: SHAPES[name] for name in args.rows}, tokens=args.tokens, rounds=args.rounds, nested=not args.flat,
            device=device, seed=args.seed,
        ), table,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.nf4", main))
