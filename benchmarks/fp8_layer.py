"""A decoder layer's frozen weights multiplied in bf16 and in FP8, forward and backward: what `fp8_products` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.fp8_quantise import BLOCK, quantise_blocks, quantise_tensor
from benchmarks.model_shapes import ModelShape
from fastpack_trl.kernels.fp8 import (
    Quantised,
    quantise_rows,
    quantise_rows_torch,
    scaled_product,
    scaled_product_torch,
    transposed,
)

BF16 = "bf16"
SHORT = 128
"""Rows of a product for its error: not worth compiling for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to multiply in FP8."""

    scaling: str
    """``row``: a scale per row of both operands; ``tensor``: one; ``block``: 1 x 128 of activations, 128 x 128 of W."""
    kept: bool
    """Whether the transposed weight is kept, or made per use."""
    fast: bool = True
    """Whether the device may sum in fewer bits than fp32 (`use_fast_accum`)."""


CANDIDATES = {
    "row, both layouts": Candidate("row", True),
    "row, transposed per use": Candidate("row", False),
    "row, both layouts, fp32 sums": Candidate("row", True, fast=False),
    "tensor, both layouts": Candidate("tensor", True),
    "tensor, transposed per use": Candidate("tensor", False),
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
        quantise = {"row": quantise_rows_torch, "tensor": quantise_tensor, "block": quantise_blocks}[candidate.scaling]
        forward = quantise(weight)
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


def activations(candidate: Candidate, x: Tensor, factor: Tensor | None = None) -> Quantised:
    """Quantise activations or gradients, (tokens, features), as a candidate does."""
    if candidate.scaling == "tensor":
        return compiled_on_cuda(quantise_tensor, x)(x) if len(x) > SHORT else quantise_tensor(x)
    return quantise_rows(x, factor, BLOCK if candidate.scaling == "block" else None)


def product(a: Quantised, b: Quantised, fast: bool) -> Tensor:
    """Return ``a b^T`` in bf16. Shapes: a (rows, inner), b (columns, inner)."""
    return scaled_product(a, b, torch.bfloat16, fast=fast)


def path_of(device: str) -> str:
    """Return what multiplies on a device."""
    return "torch._scaled_mm" if device == "cuda" else f"{scaled_product_torch.__name__}, in fp32"


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def compiled_on_cuda(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    return _compiled(function) if x.is_cuda else function


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
