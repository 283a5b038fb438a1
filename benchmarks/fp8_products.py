"""FP8 products of frozen weights beside bf16's: forward ``x W^T`` and backward ``dX = dy W`` of a decoder layer.

All seven projections, what is quantised in each step included: an input once for all that read it, each gradient by
itself. Frozen weights are quantised beforehand. Hopper reads both operands of an FP8 product along its contraction, so
backward needs the transposed weight: kept as a second layout, or made per use. A scale per row of W lies along
backward's contraction: it is multiplied into dy before dy is quantised, and both directions use the same FP8 values.

The sides take turns. On CUDA a turn is a graph, replayed: the device alone. A layer's weights are larger than the
device's cache. Errors are against float64, of some rows.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.command import in_one_line, record_of
from benchmarks.fp8_layer import (
    BF16,
    CANDIDATES,
    OUTLIERS,
    SHORT,
    Candidate,
    Frozen,
    Layer,
    Projection,
    activations,
    compiled_on_cuda,
    path_of,
    product,
    projections,
    random_rows,
    random_weight,
)
from benchmarks.fp8_quantise import BLOCK, quantise_tensor
from benchmarks.fp8_table import table
from benchmarks.model_shapes import ModelShape, shape_of
from benchmarks.nf4 import replayed_graph
from fastpack_trl.errors import UserError
from fastpack_trl.kernels.fp8 import Quantised, quantise_rows, quantise_rows_torch, transposed
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import summary
from fastpack_trl.measure.record import check_writable, make_record, write_json
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import clock_of

CASE = "fp8_products"
WORTH = 1.35
"""Ratio to bf16 from which FP8 products are worth a feature."""
MODELS, TOKENS = ("qwen3-8b", "qwen3-14b"), (4096, 8192)
SMALL = "small"
"""The shape that a CPU can do."""
_TURN_BYTES = 1 << 28
_SHAPES = 64
"""Graphs of one compiled function at most: each shape has its own."""


def measure(
    models: Mapping[str, ModelShape], *, tokens: Sequence[int] = TOKENS, rounds: int = 11, seconds: float = math.inf,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Time layers, take the errors of each projection, and time its parts at the fewest tokens.

    Args:
        models: shapes by name.
        tokens: rows of activations.
        rounds: turns of each side.
        seconds: no further row is begun after that many.
        device: ``cuda`` or ``cpu``.
        seed: of weights and activations.

    Returns:
        A record; rows of the kinds ``layer``, ``parts`` and ``errors``. Incomplete if seconds ran out.

    Raises:
        UserError: a model has projections whose dimensions are no multiples of a block.
    """
    for name, shape in models.items():
        if any(each.out_features % BLOCK or each.in_features % BLOCK for each in projections(shape)):
            raise UserError(f"{name}: dimensions of its projections are no multiples of {BLOCK}, the size of a block")
    end = time.perf_counter() + seconds
    rows = []
    todo = list(_tasks(models, tokens, rounds, device, seed))
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        for task in todo:
            if time.perf_counter() >= end:
                break
            rows.append(task())
    settings = {
        "models": list(models), "tokens": list(tokens), "rounds": rounds, "worth": WORTH,
        "error_rows": SHORT, "outliers": {name: list(outlier) for name, outlier in OUTLIERS.items()},
    }  # fmt: skip
    return make_record(
        case=CASE, settings=settings, rows=rows, complete=len(rows) == len(todo), device=device,
        threads=torch.get_num_threads(), seed=seed,
    )  # fmt: skip


def _tasks(
    models: Mapping[str, ModelShape], tokens: Sequence[int], rounds: int, device: str, seed: int
) -> Iterator[Callable[[], dict[str, Any]]]:
    for name, shape in models.items():
        for count in tokens:
            yield partial(_layer_row, name, shape, count, rounds, device, seed)
    for name, shape in models.items():
        for each in distinct(projections(shape)):
            yield partial(_errors_row, name, each, device, seed)
    for name, shape in models.items():
        for each in distinct(projections(shape)):
            yield partial(_parts_row, name, each, min(tokens), rounds, device, seed)


def distinct(of: Sequence[Projection]) -> list[Projection]:
    """Return one projection of each shape, named after all that have it: ``k, v``."""
    groups: dict[tuple[int, int], list[str]] = {}
    for each in of:
        groups.setdefault((each.out_features, each.in_features), []).append(each.name)
    return [Projection(", ".join(names), *shape, "") for shape, names in groups.items()]


def _layer_row(name: str, shape: ModelShape, tokens: int, rounds: int, device: str, seed: int) -> dict[str, Any]:
    layer = Layer.random(shape, tokens, device, seed)
    sides: dict[str, Callable[[], int]] = {BF16: layer.in_bf16}
    nbytes = {BF16: sum(weight.nbytes for weight in layer.weights.values())}
    paths = {BF16: "torch.mm"}
    for side, candidate in CANDIDATES.items():
        frozen = {part: Frozen.of(weight, candidate) for part, weight in layer.weights.items()}
        nbytes[side] = sum(each.nbytes for each in frozen.values())
        paths[side] = path_of(device)
        sides[side] = partial(layer.in_fp8, candidate, frozen)
    found, failed = _turns(sides, rounds, device)
    flops = 4 * tokens * sum(each.weights for each in layer.projections)
    figures: dict[str, Any] = {side: {"failed": reason} for side, reason in failed.items()}
    for side, seconds in found.seconds.items():
        figures[side] = {
            "seconds": summary(seconds), "tflops": flops / sorted(seconds)[len(seconds) // 2] / 1e12,
            "bytes": nbytes[side], "path": paths[side],
        }  # fmt: skip
    ratios = {side: found.ratio(BF16, side) for side in found.seconds if side != BF16}
    return {
        "kind": "layer", "setting": f"{name}, {tokens:,} tokens", "model": name, "tokens": tokens,
        "layers": shape.fields["num_hidden_layers"], "flops": flops, "sides": figures, "ratios": ratios,
    }  # fmt: skip


def _turns(sides: Mapping[str, Callable[[], int]], rounds: int, device: str) -> tuple[Any, dict[str, str]]:
    """Time sides in turns, on CUDA as graphs; return what `take_turns` found, and the sides without a graph."""
    ready: dict[str, Callable[[], int]] = {}
    failed = {}
    for side, run in sides.items():
        replay, why = attempt(partial(replayed_graph, run)) if device == "cuda" else (run, None)
        if replay is None:
            failed[side] = why or ""
        else:
            ready[side] = replay
    found = take_turns(ready, rounds=rounds, warmup=2, clock=clock_of(device))
    return found, failed | found.failed


def _parts_row(name: str, of: Projection, tokens: int, rounds: int, device: str, seed: int) -> dict[str, Any]:
    """Time products without quantisation, quantisations and transposes, each over weights larger than the cache."""
    torch.manual_seed(seed)
    count = max(2, min(16, _TURN_BYTES // (2 * of.weights))) if device == "cuda" else 1
    x, grad = (random_rows(tokens, features, device) for features in (of.in_features, of.out_features))
    weights = [random_weight(of, device) for _ in range(count)]
    calls: dict[str, Callable[[int], object]] = {
        f"{BF16} forward": lambda at: F.linear(x, weights[at]),
        f"{BF16} backward": lambda at: grad.mm(weights[at]),
    }
    for side, candidate in CANDIDATES.items():
        if not candidate.kept:
            continue
        frozen = [Frozen.of(weight, candidate) for weight in weights]
        short = side.replace(", both layouts", "")
        calls[f"{short} forward"] = partial(_forward, candidate, activations(candidate, x), frozen)
        calls[f"{short} backward"] = partial(_backward, candidate, activations(candidate, grad), frozen)
    rows = Frozen.of(weights[0], CANDIDATES["row, both layouts"])
    calls |= {
        "quantise x, torch": lambda at: quantise_rows_torch(x),
        "quantise x, compiled": lambda at: compiled_on_cuda(quantise_rows_torch, x)(x),
        "quantise x, kernel": lambda at: quantise_rows(x),
        "quantise dy, kernel": lambda at: quantise_rows(grad, rows.factor),
        "quantise x by blocks, kernel": lambda at: quantise_rows(x, None, BLOCK),
        "quantise x per tensor, compiled": lambda at: compiled_on_cuda(quantise_tensor, x)(x),
        "transpose W, torch": lambda at: rows.forward.values.t().contiguous(),
        "transpose W, kernel": lambda at: transposed(rows.forward.values),
    }

    def all_of(call: Callable[[int], object]) -> Callable[[], int]:
        def run() -> int:
            for at in range(count):
                call(at)
            return 0

        return run

    found, failed = _turns({part: all_of(call) for part, call in calls.items()}, rounds, device)
    parts: dict[str, Any] = {part: {"failed": reason} for part, reason in failed.items()}
    for part, seconds in found.seconds.items():
        parts[part] = {"seconds": summary([each / count for each in seconds])}
    return {
        "kind": "parts", "setting": f"{name} {of.name}, {tokens:,} tokens", "model": name, "tokens": tokens,
        "projection": of.name, "shape": [of.out_features, of.in_features], "parts": parts,
    }  # fmt: skip


def _forward(candidate: Candidate, x: Quantised, weights: Sequence[Frozen], at: int) -> Tensor:
    return product(x, weights[at].forward, candidate.fast)


def _backward(candidate: Candidate, grad: Quantised, weights: Sequence[Frozen], at: int) -> Tensor:
    return product(grad, weights[at].across(), candidate.fast)


def _errors_row(name: str, of: Projection, device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = random_weight(of, device)
    exact = weight.double()
    errors: dict[str, dict[str, Any]] = {}
    for outliers in OUTLIERS:
        x = random_rows(SHORT, of.in_features, device, outliers)
        grad = random_rows(SHORT, of.out_features, device, outliers)
        true = x.double() @ exact.t(), grad.double() @ exact
        made = {BF16: (F.linear(x, weight), grad.mm(weight))}
        for side, candidate in CANDIDATES.items():
            if candidate.kept:
                found, _ = attempt(partial(_both_ways, candidate, x, grad, weight))
                if found is not None:
                    made[side.replace(", both layouts", "")] = found
        for side, both in made.items():
            errors.setdefault(side, {})[outliers] = {
                way: error(one, other) for way, one, other in zip(("forward", "backward"), both, true, strict=True)
            }
    return {
        "kind": "errors", "setting": f"{name} {of.name}", "model": name, "projection": of.name,
        "shape": [of.out_features, of.in_features], "errors": errors,
    }  # fmt: skip


def _both_ways(candidate: Candidate, x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    frozen = Frozen.of(weight, candidate)
    return (
        product(activations(candidate, x), frozen.forward, candidate.fast),
        product(activations(candidate, grad, frozen.factor), frozen.across(), candidate.fast),
    )


def error(found: Tensor, true: Tensor) -> dict[str, float]:
    """Return the relative error of a matrix, and of its worst row, by the Euclidean norm."""
    apart = found.double() - true
    rows = apart.norm(dim=1) / true.norm(dim=1)
    return {"whole": float(apart.norm() / true.norm()), "worst_row": float(rows.max())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.fp8_products``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_products", description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="of benchmarks.model_shapes (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no row after that many (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--report", metavar="FILE", help="print the tables of a record and stop")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.report is not None:
        print(table(record_of(args.report, CASE)))
        return
    models = {name: shape_of(name) for name in args.model}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and set(models) != {SMALL}:
        raise UserError(f"torch sees no CUDA device, and these shapes are for one: give --model {SMALL}, or use a GPU")
    file = None if args.json is None else check_writable(args.json)
    record = measure(
        models, tokens=args.tokens, rounds=args.rounds, seconds=args.seconds,
        device=device, seed=args.seed,
    )  # fmt: skip
    if file is not None:
        write_json(file, record)
    print(table(record))


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.fp8_products", main))
