"""The frozen weight under a LoRA adapter: dense, or 4-bit and dequantised once per use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels.dequantise import Scales, dequantise_4bit


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


def add_product(low: Tensor, rows: Tensor, base: BaseWeight) -> Tensor:
    """Add in place: ``low += rows W^T``. Shapes: low (tokens, out_features), rows (tokens, in_features)."""
    # With `out=`, not `addmm_`: FLOP counters know `addmm` alone.
    return torch.addmm(low, rows, base.dense(rows.dtype).t(), out=low)


def grad_input(grad: Tensor, base: BaseWeight) -> Tensor:
    """Return ``grad W``, (tokens, in_features), for a gradient of shape (tokens, out_features)."""
    return grad.mm(base.dense(grad.dtype))


def _dequantised(base: BaseWeight) -> Tensor:
    assert base.weight is not None
    assert base.absmax is not None
    state = Scales(base.absmax, base.nested_absmax, base.nested_code, base.nested_offset).state(
        quant_type=base.quant_type, blocksize=base.blocksize, nested_blocksize=base.nested_blocksize,
        shape=(base.out_features, base.in_features), dtype=base.dtype,
    )  # fmt: skip
    return dequantise_4bit(base.weight.view(-1, 1), state)
