"""The frozen weight under a LoRA adapter: dense, in 4 bits and dequantized per use, or multiplied in FP8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.dequantize import Scales, dequantize_4bit
from fastpack_trl.kernels.fp8 import MULTIPLE, Quantized, quantize_rows, scaled_product, transposed
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.streams import on_default_stream
from fastpack_trl.model.upstream import Conv1D


class BaseWeight(NamedTuple):
    """``BaseWeight(weight)`` is dense; with `absmax` it is in bitsandbytes' 4-bit format.

    A flat tuple of tensors and constants, so that it passes through autograd functions and `torch.compile` unchanged.
    """

    weight: Tensor
    """Dense: (out_features, in_features). 4-bit: bitsandbytes' packed storage."""
    absmax: Tensor | None = None
    """One scale per block: fp32, or uint8 if the scales are quantized themselves (double quantization)."""
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
    """Dtype of the dequantized values."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out_features, in_features), in `dtype`."""
        if self.absmax is None:
            return self.weight.to(dtype)
        state = Scales(self.absmax, self.nested_absmax, self.nested_code, self.nested_offset).state(
            quant_type=self.quant_type, blocksize=self.blocksize, nested_blocksize=self.nested_blocksize,
            shape=(self.out_features, self.in_features), dtype=self.dtype,
        )  # fmt: skip
        return dequantize_4bit(self.weight.view(-1, 1), state).to(dtype)

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether a projection in `dtype` can multiply by this copy."""
        return self.weight.dtype == dtype


class Fp8Weight(NamedTuple):
    """A frozen weight in FP8 with a scale per row; forward and backward multiply the same values.

    In backward the scales of rows lie along the contraction, so they are multiplied into the gradient before quantizing
    it.
    """

    weight: Tensor
    """(out_features, in_features) in FP8; backward transposes it per use."""
    scales: Tensor
    """(out_features, 1), fp32."""
    ones: Tensor
    """(in_features, 1), fp32: the scales of the transposed weight."""

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """Quantize a dense weight, (out_features, in_features)."""
        values, scales = quantize_rows(weight)
        return cls(values, scales, scales.new_ones(weight.shape[1], 1))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out_features, in_features), in `dtype`."""
        return Quantized(self.weight, self.scales).dense().to(dtype)

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether a projection in `dtype` can multiply by it: CUDA's FP8 matmuls return 16-bit dtypes."""
        return dtype.itemsize == 2 or not self.weight.is_cuda

    def product(self, rows: Quantized, dtype: torch.dtype) -> Tensor:
        """Return ``rows W^T``, (tokens, out_features), in `dtype`."""
        return scaled_product(rows, Quantized(self.weight, self.scales), dtype)

    def grad_input(self, grad: Tensor) -> Tensor:
        """Return ``grad W``, (tokens, in_features), for a gradient of the output."""
        columns = Quantized(transposed(self.weight), self.ones)
        return scaled_product(quantize_rows(grad, self.scales.view(-1)), columns, grad.dtype)


def from_4bit(weight: Any) -> BaseWeight:
    """Take the parts of a bitsandbytes `Params4bit`, by reference: shapes as in `BaseWeight`."""
    state = weight.quant_state
    nested = state.state2.blocksize if state.nested else 0
    sizes = (nested, state.blocksize, state.quant_type, *state.shape, state.dtype)
    return BaseWeight(weight.data, *Scales.of(state), *sizes)


def loaded_weight(base: Any) -> BaseWeight:
    """Return the weight of a base layer by reference, (out_features, in_features): dense or 4-bit."""
    if type(base).__name__ == "Linear4bit":
        return from_4bit(base.weight)
    return BaseWeight(base.weight.data.t() if isinstance(base, Conv1D) else base.weight.data)


def add_product(low: Tensor, rows: Tensor, base: BaseWeight | Fp8Weight, quantized: Quantized | None = None) -> Tensor:
    """Add in place: ``low += rows W^T``. Shapes: low (tokens, out_features), rows (tokens, in_features)."""
    if isinstance(base, Fp8Weight):
        return low.add_(base.product(quantized or quantize_rows(rows), rows.dtype))
    # With `out=`, not `addmm_`, because FLOP counters only know `addmm`.
    return torch.addmm(low, rows, base.dense(rows.dtype).t(), out=low)


def grad_input(grad: Tensor, base: BaseWeight | Fp8Weight, total: Tensor | None = None) -> Tensor:
    """Return ``grad W``, (tokens, in_features), for a gradient of shape (tokens, out_features); added to `total`."""
    if isinstance(base, Fp8Weight):
        out = base.grad_input(grad)
        return out if total is None else total.add_(out)
    weight = base.dense(grad.dtype)
    return grad.mm(weight) if total is None else torch.addmm(total, grad, weight, out=total)


class HasFrozenWeight(nn.Module):
    """A LoRA layer that may multiply by a copy of its frozen weight, kept for the run."""

    fastpack_dense: BaseWeight | Fp8Weight | None = None
    """The copy, in the compute dtype or in FP8."""
    fastpack_copied_from: Any = None
    """The parameter that the copy was made from, with its version and address at that time."""

    # Merging writes to ``weight.data``, which is not detected.
    def merge(self, *args: Any, **kwargs: Any) -> Any:
        self._fastpack_drop_copy()
        with on_default_stream(self.base_layer.weight.device):  # of bitsandbytes' quantizers
            return super().merge(*args, **kwargs)

    def unmerge(self, *args: Any, **kwargs: Any) -> Any:
        self._fastpack_drop_copy()
        with on_default_stream(self.base_layer.weight.device):
            return super().unmerge(*args, **kwargs)

    @property
    def fastpack_multiplies_in_fp8(self) -> bool:
        """Whether the FP8 copy is up to date with the layer's parameter."""
        return isinstance(self.fastpack_dense, Fp8Weight) and self._fastpack_is_source(self.base_layer.weight)

    def _fastpack_keep_copy(self, copied: BaseWeight | Fp8Weight) -> None:
        """Multiply by this copy until the weight's parameter changes."""
        weight = self.base_layer.weight
        self.fastpack_dense = copied
        self.fastpack_copied_from = (weight, weight._version, weight.data_ptr())

    def _fastpack_drop_copy(self) -> None:
        self.__dict__.pop("fastpack_dense", None)
        self.__dict__.pop("fastpack_copied_from", None)

    def _fastpack_is_source(self, weight: Tensor) -> bool:
        source, version, address = self.fastpack_copied_from
        if source is not weight:
            return False  # merging and unmerging made a new bitsandbytes parameter
        return torch.compiler.is_compiling() or (version == weight._version and address == weight.data_ptr())


def put_in_fp8(layer: Any, dtype: torch.dtype) -> None:
    """Multiply by a frozen weight in FP8 (of 4 bits: by way of `dtype`); `_fastpack_drop_copy` reverts that."""
    base = layer.base_layer
    weight = loaded_weight(base).dense(dtype if type(base).__name__ == "Linear4bit" else base.weight.dtype)
    layer._fastpack_keep_copy(Fp8Weight.of(weight))


def reasons_against(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return why layers cannot multiply in FP8, by name; supported layers are omitted."""
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    base = text_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    reasons = {name: first_reason(_reasons(layer, head, uses)) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reasons(layer: Any, head: Any, uses: Mapping[int, int]) -> Iterator[object]:
    base = layer.base_layer
    weight = base._parameters.get("weight")
    yield layer is head and "the head"
    yield type(base).__name__ == "Linear8bitLt" and "8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits"
    yield layer.fastpack_multiplies_in_fp8 and "a weight that another run holds in FP8: end that run first"
    yield layer.merged and "merged adapters: call model.unmerge_adapter() first"
    yield (weight is None or weight.requires_grad) and "a base that is not a frozen parameter"
    yield uses[id(weight)] > 1 and "a weight that other modules share"
    yield layer.fastpack_active_adapter() is None and "no or several active adapters"
    unaligned = layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    yield unaligned and f"dimensions that are not multiples of {MULTIPLE}"
