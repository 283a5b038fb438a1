"""The forms of fused layers, which kernels and their twins read, and the order of a tensor's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Pairs = Literal["half", "pairs"]
Layout = tuple[torch.dtype, tuple[int, ...] | None]
"""Dtype of a tensor and its dimensions in the order of its memory."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """``y = round(normalized) * (offset + weight) + bias``, computed in fp32 or wider; weight and bias are optional.

    The twin in `norm.py` and both kernels in `norm_triton.py` compute it, and `rotary_triton.py` for norms of heads.

    Attributes:
        eps: added to the variance (LayerNorm) or to the mean square (RMSNorm).
        centers: the mean is subtracted first: LayerNorm.
        offset: 1 if the weight is stored minus 1, as Gemma stores it.
        rounds: normalized values are rounded to the dtype of the input before the weight multiplies them (Llama);
            not in the kernel of a rotation.
        promotes: the result has the wider dtype of input and weight, else that of the input.
        widens: the result is fp32 or wider, as CUDA's autocast has it of torch's layer norm.
    """

    eps: float
    centers: bool = False
    offset: int = 0
    rounds: bool = False
    promotes: bool = False
    widens: bool = False

    def out_dtype(self, x: Tensor, weight: Tensor | None) -> torch.dtype:
        """Return the dtype of the result."""
        if self.widens:
            return torch.promote_types(x.dtype, torch.float32)
        return x.dtype if weight is None or not self.promotes else torch.promote_types(x.dtype, weight.dtype)


class Statistics(NamedTuple):
    """Per row, fp32 or wider, in the order of `rows_of`: inverse root of the variance, and the mean if it is used."""

    rstd: Tensor
    mean: Tensor | None


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """Which elements (a, b) of a head are rotated together: ``a cos - b sin``, ``b cos + a sin``.

    Attributes:
        reads: pair i of n is (i, i + n), ``half``, or (2i, 2i + 1), ``pairs``. Elements after 2n are copied.
        writes: the same for the result; DeepSeek reads pairs and writes halves.
        columns: of cos and sin for the pair; ``first``: column i for both elements.
        narrow: cos and sin have n columns, else 2n.
        promotes: the result has the wider dtype of input and cos, else that of the input.
        dense: results are contiguous, as torch's ``cat`` makes them, else they keep the memory order of their input.
    """

    reads: Pairs = "half"
    writes: Pairs = "half"
    columns: Literal["half", "pairs", "first"] = "half"
    narrow: bool = False
    promotes: bool = False
    dense: bool = False

    def num_pairs(self, cos: Tensor) -> int:
        """Return the number of pairs of a head, n."""
        return cos.shape[-1] if self.narrow else cos.shape[-1] // 2

    def empty(self, x: Tensor, cos: Tensor) -> Tensor:
        """Return an empty result for x."""
        dtype = torch.promote_types(x.dtype, cos.dtype) if self.promotes else x.dtype
        return empty_like(x, dtype, None if self.dense else memory_order(x))


def empty_like(x: Tensor, dtype: torch.dtype, order: tuple[int, ...] | None) -> Tensor:
    """Return an empty tensor of the shape of x that is dense in the order of its dimensions given."""
    if order is None:
        return x.new_empty(x.shape, dtype=dtype)
    dense = x.new_empty([x.shape[axis] for axis in order], dtype=dtype)
    return dense.permute([order.index(axis) for axis in range(len(order))])


@dataclass(frozen=True, slots=True)
class GatedForm:
    """The function ``act(gate) * up``, computed in fp32 or wider and rounded once.

    Attributes:
        act: ``silu`` is ``x sigmoid(alpha x)``, ``relu2`` is ``relu(x)^2``; ``gelu`` is the exact one.
        alpha: of ``silu``; 1.702 is the quick GELU.
        up_first: in a tensor of both halves, up comes before gate.
    """

    act: Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
    alpha: float = 1.0
    up_first: bool = False

    def halves(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of gate and up."""
        first, second = both.chunk(2, dim=-1)
        return (second, first) if self.up_first else (first, second)


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of x from the largest stride to the smallest, the last one last; None if contiguous."""
    if x.is_contiguous() or x.stride(-1) != 1:  # where the last axis is not the innermost, rows are copied
        return None
    return (*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1)


def rows_of(x: Tensor, order: tuple[int, ...] | None) -> tuple[Tensor, int]:
    """Return a tensor of rows (n, width) in the order of memory of x, or of another tensor, and their stride.

    It is x itself, or a view of it, if possible.
    """
    if order is None and x.is_contiguous():
        return x, x.shape[-1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = (x if order is None else x.permute(order)).flatten(0, -2)
    return rows, rows.stride(0)
