"""The frozen weight under a LoRA adapter: dense, 4-bit and dequantised once per use, or FP8 and multiplied as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels.dequantise import Scales, dequantise_4bit
from fastpack_trl.kernels.fp8 import BLOCK, Quantised, quantise_rows, scaled_product, transposed


class BaseWeight(NamedTuple):
    """``BaseWeight(weight)`` is dense; with `absmax` it is bitsandbytes' 4-bit format, ``BaseWeight()`` is none.

    A flat tuple of tensors and constants, so that it passes through autograd functions and `torch.compile` as it is.
    """

    weight: Tensor | None = None
    """Dense: (out_features, in_features). 4-bit: bitsandbytes' packed storage."""
    absmax: Tensor | None = None
    """One scale per block: fp32, or uint8 where the scales are quantised themselves (double quantisation)."""
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_blocksize: int = 0
    blocksize: int = 0
    quant_type: str = ""
    """``nf4`` or ``fp4``."""
    out_features: int = 0
    in_features: int = 0
    dtype: torch.dtype = torch.float32
    """Of the values after dequantisation."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out_features, in_features), in `dtype`."""
        assert self.weight is not None
        if self.absmax is None:
            return self.weight.to(dtype)
        return _dequantised(self).to(dtype)

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether a projection in `dtype` may use it as it is."""
        assert self.weight is not None
        return self.weight.dtype == dtype


class Fp8Weight(NamedTuple):
    """A frozen weight in FP8 with a scale per row, or per block of 128 x 128; both directions multiply the same values.

    Scales of rows lie along backward's contraction: they are multiplied into the gradient before that is quantised.
    With blocks, inputs and gradients have a scale per group of 128 columns.
    """

    weight: Tensor
    """(out_features, in_features) in `FP8`, as forward reads it."""
    scales: Tensor
    """fp32: (out_features, 1), or (out_features / 128, in_features / 128)."""
    scales_across: Tensor
    """fp32, the scales of `across`: (in_features, 1), ones, or (in_features / 128, out_features / 128)."""
    across: Tensor | None
    """(in_features, out_features), the weight as backward reads it; None: transposed per use."""

    @classmethod
    def of(cls, weight: Tensor, *, both_layouts: bool) -> Fp8Weight:
        """Quantise a dense weight, (out_features, in_features)."""
        values, scales = quantise_rows(weight)
        ones = scales.new_ones(weight.shape[1], 1)
        return cls(values, scales, ones, transposed(values) if both_layouts else None)

    @classmethod
    def of_blocks(cls, values: Tensor, scales: Tensor, *, both_layouts: bool) -> Fp8Weight:
        """Take FP8 values, (out_features, in_features), by reference, and their scales, one per block of 128 x 128."""
        scales = scales.float().contiguous()
        return cls(values, scales, scales.t().contiguous(), transposed(values) if both_layouts else None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out_features, in_features), in `dtype`."""
        return Quantised(self.weight, self.scales).dense().to(dtype)

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether a projection in `dtype` may use it: CUDA's products give 16-bit dtypes."""
        return dtype.itemsize == 2 or not self.weight.is_cuda

    @property
    def width(self) -> int | None:
        """Columns of inputs and gradients that have one scale; None: all of a row."""
        return None if len(self.scales) == len(self.weight) else BLOCK

    def quantised(self, rows: Tensor, by: Callable[..., Quantised] = quantise_rows) -> Quantised:
        """Quantise an input, (tokens, in_features), for `product`."""
        return by(rows, None, self.width)

    def quantised_grad(self, grad: Tensor, by: Callable[..., Quantised] = quantise_rows) -> Quantised:
        """Quantise a gradient of the output, (tokens, out_features), for `grad_input`."""
        return by(grad, None if self.width else self.scales.view(-1), self.width)

    def product(self, rows: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``rows W^T``, (tokens, out_features), in `dtype`."""
        return scaled_product(rows, Quantised(self.weight, self.scales), dtype)

    def grad_input(self, grad: Quantised, dtype: torch.dtype) -> Tensor:
        """Return ``grad W``, (tokens, in_features), for a gradient of `quantised_grad`."""
        across = transposed(self.weight) if self.across is None else self.across
        return scaled_product(grad, Quantised(across, self.scales_across), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def from_4bit(weight: Any) -> BaseWeight:
    """Take the parts of a bitsandbytes `Params4bit`, by reference: shapes as in `BaseWeight`."""
    state = weight.quant_state
    return BaseWeight(
        weight.data,
        *Scales.of(state),
        nested_blocksize=state.state2.blocksize if state.nested else 0,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        out_features=state.shape[0],
        in_features=state.shape[1],
        dtype=state.dtype,
    )


def add_product(low: Tensor, rows: Tensor, base: BaseWeight | Fp8Weight) -> Tensor:
    """Add in place: ``low += rows W^T``. Shapes: low (tokens, out_features), rows (tokens, in_features)."""
    if isinstance(base, Fp8Weight):
        return low.add_(base.product(base.quantised(rows), rows.dtype))
    # With `out=`, not `addmm_`: FLOP counters know `addmm` alone.
    return torch.addmm(low, rows, base.dense(rows.dtype).t(), out=low)


def grad_input(grad: Tensor, base: BaseWeight | Fp8Weight) -> Tensor:
    """Return ``grad W``, (tokens, in_features), for a gradient of shape (tokens, out_features)."""
    if isinstance(base, Fp8Weight):
        return base.grad_input(base.quantised_grad(grad), grad.dtype)
    return grad.mm(base.dense(grad.dtype))


def _dequantised(base: BaseWeight) -> Tensor:
    assert base.weight is not None
    assert base.absmax is not None
    state = Scales(base.absmax, base.nested_absmax, base.nested_code, base.nested_offset).state(
        quant_type=base.quant_type, blocksize=base.blocksize, nested_blocksize=base.nested_blocksize,
        shape=(base.out_features, base.in_features), dtype=base.dtype,
    )  # fmt: skip
    return dequantise_4bit(base.weight.view(-1, 1), state)
