"""4-bit weights made dense: bitsandbytes' kernels beside one kernel, alone and before the product that reads them.

The sides take turns. On CUDA a turn is a graph of calls over several weights, replayed: the device alone, no launch
waits for the host. ``eager`` is the same calls without a graph, the host's work included. The inputs of a turn are
larger than the device's cache; the dense weight is written over and over into the same memory, as in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.one_line import in_one_line
from fastpack_trl.kernels.dequantise import dequantise_4bit
from fastpack_trl.measure.intervals import summary
from fastpack_trl.measure.record import make_record, write_json
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import clock_of

SHAPES = {
    "8b q, o": (4096, 4096), "8b k, v": (1024, 4096), "8b gate, up": (12288, 4096), "8b down": (4096, 12288),
    "14b q, o": (5120, 5120), "14b k, v": (1024, 5120), "14b gate, up": (17408, 5120), "14b down": (5120, 17408),
}  # fmt: skip
"""(out_features, in_features) of the projections of Qwen3, by model and name."""
STOCK, OURS, KEPT = "bitsandbytes", "fastpack", "kept dense"
TOKENS = (2048, 4096)
_TURN_BYTES = 1 << 28
_MOST_WEIGHTS = 64


def measure(
    shapes: dict[str, tuple[int, int]], *, tokens: Sequence[int] = TOKENS, rounds: int = 15, nested: bool = True,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Time both sides over every shape.

    Args:
        shapes: (out_features, in_features) by name.
        tokens: rows of the products; each shape is also measured without one.
        rounds: turns of each side.
        nested: whether the scales are quantised themselves.
        device: ``cuda``, or ``cpu``, where the plain torch twin is in the kernel's place and nothing is in a graph.
        seed: of weights and order.

    Returns:
        A record; a row has ``sides`` with seconds of a call and of an eager call, and bytes that a call has to move.

    Raises:
        AssertionError: the sides differ.
    """
    rows = [
        _row(name, shape, count, rounds, nested, device, seed)
        for name, shape in shapes.items()
        for count in (0, *tokens)
    ]
    settings = {"rounds": rounds, "nested": nested, "dtype": "bfloat16", "turn_bytes": _TURN_BYTES}
    return make_record(
        case="nf4", settings=settings, rows=rows, complete=True, device=device, threads=torch.get_num_threads(),
        seed=seed,
    )  # fmt: skip


def _row(
    name: str, shape: tuple[int, int], tokens: int, rounds: int, nested: bool, device: str, seed: int
) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(seed)
    values = shape[0] * shape[1]
    count = max(2, min(_MOST_WEIGHTS, _TURN_BYTES // values)) if device == "cuda" else 2
    weights = [
        quantize_4bit(
            torch.randn(shape, dtype=torch.bfloat16, device=device), quant_type="nf4", compress_statistics=nested
        )
        for _ in range(count)
    ]
    dense = {STOCK: dequantize_4bit, OURS: dequantise_4bit}
    assert torch.equal(*[make(*weights[0]) for make in dense.values()]), f"{name}: the sides differ"
    if tokens:
        x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device=device)
        kept = dequantize_4bit(*weights[0])
        calls: dict[str, Callable[[Tensor, Any], Tensor]] = {
            side: lambda packed, state, make=make: F.linear(x, make(packed, state)) for side, make in dense.items()
        } | {KEPT: lambda packed, state: F.linear(x, kept)}
    else:
        calls = dict(dense)
    clock = clock_of(device)

    def all_of(call: Callable[[Tensor, Any], Tensor]) -> Callable[[], int]:
        def run() -> int:
            for packed, state in weights:
                call(packed, state)
            return 0

        return run

    eager = {side: all_of(call) for side, call in calls.items()}
    replayed = {side: replayed_graph(run) for side, run in eager.items()} if device == "cuda" else eager
    found = {
        kind: take_turns(sides, rounds=rounds, warmup=3, clock=clock)
        for kind, sides in (("seconds", replayed), ("eager_seconds", eager))
    }
    blocks = values // 64
    scales = blocks + 4 * -(-blocks // 256) if nested else 4 * blocks
    row = {
        "setting": f"{name} {shape[0]} x {shape[1]}",
        "tokens": tokens,
        "weights": count,
        "bytes": values // 2 + scales + 2 * values,
        "sides": {
            side: {kind: summary([each / count for each in turns.seconds[side]]) for kind, turns in found.items()}
            for side in calls
        },
        "ratios": {side: found["seconds"].ratio(side, OURS) for side in calls if side != OURS},
    }
    print(_line(row), flush=True)
    return row


def replayed_graph(run: Callable[[], int]) -> Callable[[], int]:
    """Record the calls into a CUDA graph; return what replays it."""
    run()  # what is made or compared on first use is there before the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> int:
        graph.replay()
        return 0

    return replay


def _line(row: dict[str, Any]) -> str:
    what = f"F.linear of {row['tokens']:,} tokens" if row["tokens"] else "alone"
    parts = []
    for name, side in row["sides"].items():
        seconds, eager = side["seconds"]["median"], side["eager_seconds"]["median"]
        rate = f", {row['bytes'] / seconds / 1e9:,.0f} GB/s" if not row["tokens"] else ""
        parts.append(f"{name} {seconds * 1e6:.1f} us{rate} (eager {eager * 1e6:.1f})")
    ratio = row["ratios"][STOCK]
    return (
        f"{row['setting']:26} {what:24} {'; '.join(parts)}; {STOCK}/{OURS} {ratio['median']:.2f} "
        f"({ratio['low']:.2f} to {ratio['high']:.2f})"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.nf4``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nf4", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="rows of the products")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default: 15)")
    parser.add_argument("--flat", action="store_true", help="scales in fp32 (default: quantised themselves)")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=SHAPES, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    record = measure(
        {name: SHAPES[name] for name in args.only or SHAPES}, tokens=args.tokens, rounds=args.rounds,
        nested=not args.flat, device="cuda" if torch.cuda.is_available() else "cpu", seed=args.seed,
    )  # fmt: skip
    if args.json is not None:
        write_json(Path(args.json), record)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.nf4", main))
