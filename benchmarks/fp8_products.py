"""FP8 products of frozen weights beside bf16's: forward ``x W^T`` and backward ``dX = dy W`` of a decoder layer.

All seven projections, what is quantised in each step included: an input once for all that read it, each gradient by
itself. Frozen weights are quantised beforehand. Hopper reads both operands of an FP8 product along its contraction, so
backward needs the transposed weight: kept as a second layout, or made per use. A scale per row of W lies along
backward's contraction: it is multiplied into dy before dy is quantised, and both directions use the same FP8 values.

The sides take turns. On CUDA a layer is a graph, replayed with a cold cache: the device alone. Errors are against
float64, of some rows.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.cases import Run, time_calls
from benchmarks.command import CaseCommand
from benchmarks.model_shapes import ModelShape, shape_of
from benchmarks.readme_cells import grid, ratio_cell
from fastpack_trl.bench.result_file import ResultFile, RowTask
from fastpack_trl.bench.views import device_of
from fastpack_trl.errors import UserError
from fastpack_trl.kernels.fp8 import (
    Quantised,
    cast,
    magnitudes,
    quantise_rows,
    quantise_rows_torch,
    scaled_product,
    scaled_product_torch,
    scales_of,
    transposed,
)
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import ratio_summary, summary

CASE = "fp8_products"
WORTH = 1.35
"""Ratio to bf16 from which FP8 products are worth a feature."""
MODELS, TOKENS = ("qwen3-8b", "qwen3-14b"), (4096, 8192)
SMALL = "small"
"""The shape that a CPU can do."""
BF16 = "bf16"
BLOCK = 128
SHORT = 128
"""Rows of a product for its error."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to multiply in FP8."""

    scaling: str
    """``row``: a scale per row of both operands; ``block``: per 1 x 128 of activations and 128 x 128 of W."""
    kept: bool
    """Whether the transposed weight is kept, or made per use."""
    fast: bool = True
    """Whether the device may sum in fewer bits than fp32 (`use_fast_accum`)."""


CANDIDATES = {
    "row, both layouts": Candidate("row", True),
    "row, transposed per use": Candidate("row", False),
    "row, both layouts, fp32 sums": Candidate("row", True, fast=False),
    "block, both layouts": Candidate("block", True, fast=False),
    "block, transposed per use": Candidate("block", False, fast=False),
}
"""Blocks are summed in fp32 by definition: their scales change along the contraction."""
OUTLIERS = {"none": (0, 1.0), "x30": (100, 30.0), "x1e4": (1000, 1e4)}
"""By name: one channel of so many is larger by this factor; 0: none."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A frozen weight of (out_features, in_features) and the input that it reads."""

    name: str
    out_features: int
    in_features: int
    reads: str

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features


def projections(shape: ModelShape) -> tuple[Projection, ...]:
    """Return the seven projections of a decoder layer."""
    of = shape.fields
    hidden, inner, head = of["hidden_size"], of["intermediate_size"], of["head_dim"]
    queries, keys = head * of["num_attention_heads"], head * of["num_key_value_heads"]
    return (
        Projection("q", queries, hidden, "attention"), Projection("k", keys, hidden, "attention"),
        Projection("v", keys, hidden, "attention"), Projection("o", hidden, queries, "heads"),
        Projection("gate", inner, hidden, "mlp"), Projection("up", inner, hidden, "mlp"),
        Projection("down", hidden, inner, "inner"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frozen:
    """A quantised weight as a candidate keeps it."""

    forward: Quantised
    backward: Quantised | None
    """Transposed, (in_features, out_features); its scales are those of the product; None: made per use."""
    factor: Tensor | None
    """(out_features,) fp32, multiplied into dy."""

    @classmethod
    def of(cls, weight: Tensor, candidate: Candidate) -> Frozen:
        forward = (quantise_rows_torch if candidate.scaling == "row" else quantise_blocks)(weight)
        factor = forward.scales.view(-1) if candidate.scaling == "row" else None
        made = cls(forward, None, factor)
        return cls(forward, made.across(), factor) if candidate.kept else made

    def across(self) -> Quantised:
        """Return the transposed weight, kept or made here."""
        if self.backward is not None:
            return self.backward
        values, scales = self.forward
        if self.factor is not None:
            return Quantised(transposed(values), scales.new_ones(values.shape[1], 1))
        return Quantised(transposed(values), scales.t().contiguous())

    @property
    def nbytes(self) -> int:
        return self.forward.nbytes + (0 if self.backward is None else self.backward.nbytes)


def quantise_blocks(x: Tensor) -> Quantised:
    """Quantise a matrix, of multiples of 128, with a scale per block of 128 x 128."""
    blocks = x.float().view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales, inverse = scales_of(magnitudes(blocks).amax((1, 3)))
    return Quantised(cast(blocks * inverse[:, None, :, None]).view(x.shape), scales)


def activations(candidate: Candidate, x: Tensor, factor: Tensor | None = None) -> Quantised:
    """Quantise activations or gradients, (tokens, features), as a candidate does."""
    return quantise_rows(x, factor, BLOCK if candidate.scaling == "block" else None)


def product(a: Quantised, b: Quantised, fast: bool) -> Tensor:
    """Return ``a b^T`` in bf16. Shapes: a (rows, inner), b (columns, inner)."""
    return scaled_product(a, b, torch.bfloat16, fast=fast)


@dataclass(frozen=True, slots=True)
class Layer:
    """Inputs, gradients and bf16 weights of a layer's projections, by name; one number of tokens."""

    projections: tuple[Projection, ...]
    inputs: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    @classmethod
    def random(cls, shape: ModelShape, tokens: int, device: str, seed: int) -> Layer:
        torch.manual_seed(seed)
        made = projections(shape)
        inputs = {each.reads: random_rows(tokens, each.in_features, device) for each in made}
        grads = {each.name: random_rows(tokens, each.out_features, device) for each in made}
        return cls(made, inputs, grads, {each.name: random_weight(each, device) for each in made})

    def in_bf16(self) -> int:
        """Multiply forward and backward."""
        for each in self.projections:
            F.linear(self.inputs[each.reads], self.weights[each.name])
        for each in reversed(self.projections):
            self.grads[each.name].mm(self.weights[each.name])
        return 0

    def in_fp8(self, candidate: Candidate, frozen: Mapping[str, Frozen]) -> int:
        """Multiply forward and backward, an input quantised once for the projections that read it."""
        read: dict[str, Quantised] = {}
        for each in self.projections:
            if each.reads not in read:
                read = {each.reads: activations(candidate, self.inputs[each.reads])}
            product(read[each.reads], frozen[each.name].forward, candidate.fast)
        for each in reversed(self.projections):
            weight = frozen[each.name]
            grad = activations(candidate, self.grads[each.name], weight.factor)
            product(grad, weight.across(), candidate.fast)
        return 0


def random_rows(tokens: int, features: int, device: str, outliers: str = "none") -> Tensor:
    """Return activations or gradients in bf16 whose rows have different sizes, with outlier channels of `OUTLIERS`."""
    rows = torch.randn(tokens, features, device=device) * torch.randn(tokens, 1, device=device).exp()
    every, factor = OUTLIERS[outliers]
    if every:
        rows[:, every // 2 % features :: every] *= factor
    return rows.bfloat16()


def random_weight(of: Projection, device: str) -> Tensor:
    """Return a weight in bf16 whose rows have different sizes."""
    rows = torch.randn(of.out_features, of.in_features, device=device)
    return (0.02 * rows * (0.3 * torch.randn(of.out_features, 1, device=device)).exp()).bfloat16()


def measure(run: Run, models: Mapping[str, ModelShape], *, tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """Time layers, and take the errors of each projection.

    Returns:
        A record; rows of the kinds ``layer`` and ``errors``.

    Raises:
        UserError: a model has projections whose dimensions are no multiples of a block.
    """
    for name, shape in models.items():
        if any(each.out_features % BLOCK or each.in_features % BLOCK for each in projections(shape)):
            raise UserError(f"{name}: dimensions of its projections are no multiples of {BLOCK}, the size of a block")
    tasks = [
        RowTask(
            {"kind": "layer", "setting": f"{name}, {count:,} tokens", "model": name, "tokens": count},
            partial(_layer_row, run, shape, count),
        )
        for name, shape in models.items() for count in tokens
    ] + [
        RowTask(
            {"kind": "errors", "setting": f"{name} {each.name}", "model": name, "projection": each.name},
            partial(_errors_row, run, each),
        )
        for name, shape in models.items() for each in distinct(projections(shape))
    ]  # fmt: skip
    settings = {
        "models": list(models), "tokens": list(tokens), "worth": WORTH, "error_rows": SHORT,
        "outliers": {name: list(outlier) for name, outlier in OUTLIERS.items()},
    }  # fmt: skip
    return run.record(CASE, tasks, settings)


def distinct(of: Sequence[Projection]) -> list[Projection]:
    """Return one projection of each shape, named after all that have it: ``k, v``."""
    groups: dict[tuple[int, int], list[str]] = {}
    for each in of:
        groups.setdefault((each.out_features, each.in_features), []).append(each.name)
    return [Projection(", ".join(names), *shape, "") for shape, names in groups.items()]


def _layer_row(run: Run, shape: ModelShape, tokens: int, _seconds: float) -> dict[str, Any]:
    device = run.device
    layer = Layer.random(shape, tokens, device, run.seed)
    sides: dict[str, Callable[[], int]] = {BF16: layer.in_bf16}
    nbytes = {BF16: sum(weight.nbytes for weight in layer.weights.values())}
    for side, candidate in CANDIDATES.items():
        frozen = {part: Frozen.of(weight, candidate) for part, weight in layer.weights.items()}
        nbytes[side] = sum(each.nbytes for each in frozen.values())
        sides[side] = partial(layer.in_fp8, candidate, frozen)
    found, failed = time_calls(sides, device, rounds=run.rounds)
    flops = 4 * tokens * sum(each.weights for each in layer.projections)
    in_fp8 = "torch._scaled_mm" if device == "cuda" else f"{scaled_product_torch.__name__}, in fp32"
    figures: dict[str, Any] = {side: {"failed": reason} for side, reason in failed.items()}
    for side, seconds in found.items():
        figures[side] = {
            "seconds": summary(seconds), "tflops": flops / sorted(seconds)[len(seconds) // 2] / 1e12,
            "bytes": nbytes[side], "path": "torch.mm" if side == BF16 else in_fp8,
        }  # fmt: skip
    ratios = {side: ratio_summary(found[BF16], found[side]) for side in found if side != BF16}
    return {
        "layers": shape.fields["num_hidden_layers"], "flops": flops, "sides": figures, "ratios": ratios,
    }  # fmt: skip


def _errors_row(run: Run, of: Projection, _seconds: float) -> dict[str, Any]:
    device = run.device
    torch.manual_seed(run.seed)
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
    return {"shape": [of.out_features, of.in_features], "errors": errors}


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


def layers_table(record: Mapping[str, Any]) -> str:
    """Return Markdown: what is decided, and a table of layers."""
    rows = _of_kind(record, "layer")
    made_by = f"{device_of(record)}, torch {record['versions']['torch']}"
    head = f"**FP8 products of frozen weights beside bf16's, {made_by}.**"
    lines = [head, "", *(decision(row, record["settings"]["worth"]) for row in rows)]
    if not record["complete"] or any(row.get("skipped") for row in record["rows"]):
        lines.append("Seconds ran out: later rows are open.")
    columns = "layer, forward and dX | side | >ms | >TFLOP/s | >over bf16 | >weights of all layers, GiB | by"
    return "\n".join([*lines, "", grid(columns, [line for row in rows for line in _layer(row)])])


def _of_kind(record: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if row["kind"] == kind and not row.get("skipped")]


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: what is decided, a table of layers and one of errors."""
    errors = [line for row in _of_kind(record, "errors") for line in _errors(row)]
    columns = "relative error, forward / dX | outliers | of | of the worst row"
    return "\n".join([layers_table(record), "", grid(columns, errors)])


def decision(row: Mapping[str, Any], worth: float) -> str:
    """Return the line that says whether the products of a layer are worth a feature."""
    found = max(row["ratios"].items(), key=lambda pair: pair[1]["median"], default=None)
    if found is None:
        return f"{row['setting']}: at least {worth:g}x: no (nothing ran)  "
    side, ratio = found
    answer = "yes" if ratio["median"] >= worth else "no"
    return (
        f"{row['setting']}: at least {worth:g}x: {answer} ({side}: {ratio['median']:.2f}, {ratio['low']:.2f} to "
        f"{ratio['high']:.2f})  "
    )


def _layer(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for side, found in row["sides"].items():
        if "failed" in found:
            yield [row["setting"], side, found["failed"], *["-"] * 4]
            continue
        over = ratio_cell(row["ratios"][side]) if side in row["ratios"] else "-"
        gib, milliseconds = found["bytes"] * row["layers"] / 2**30, found["seconds"]["median"] * 1e3
        figures = [f"{milliseconds:.3f}", f"{found['tflops']:,.0f}", over, f"{gib:.1f}"]
        yield [row["setting"], side, *figures, found["path"]]


def _errors(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for side, by_outliers in row["errors"].items():
        for outliers, ways in by_outliers.items():
            cells = [
                " / ".join(f"{ways[way][of]:.1e}" for way in ("forward", "backward")) for of in ("whole", "worst_row")
            ]
            yield [row["setting"], f"{side}, outliers {outliers}", *cells]


def _record(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    models, run = {name: shape_of(name) for name in args.rows}, Run.of(args, file)
    if run.device == "cpu" and set(models) != {SMALL}:
        raise UserError(f"torch sees no CUDA device, and these shapes are for one: give --model {SMALL}, or use a GPU")
    return measure(run, models, tokens=args.tokens)


def add_options(parser: ArgumentParser) -> None:
    """Add the rows of activations."""
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="default: %(default)s")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, default_rows=MODELS, rounds=11, seconds=110.0, record=_record, table=table,
    more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
