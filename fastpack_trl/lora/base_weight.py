"""The frozen weight under a LoRA adapter: dense, 4-bit and dequantised once per use, or FP8 and multiplied as such.

A layer may multiply by a copy of it that is kept for a run; meanwhile the weight itself may be in host memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastpack_trl.kernels.dequantise import Scales, dequantise_4bit
from fastpack_trl.kernels.fp8 import BLOCK, BLOCK_MULTIPLE, FP8, Quantised, quantise_rows, scaled_product, transposed
from fastpack_trl.model.upstream import Conv1D

logger = logging.get_logger(__name__)


class BaseWeight(NamedTuple):
    """``BaseWeight(weight)`` is dense; with `absmax` it is bitsandbytes' 4-bit format.

    A flat tuple of tensors and constants, so that it passes through autograd functions and `torch.compile` as it is.
    """

    weight: Tensor
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
        if self.absmax is None:
            return self.weight.to(dtype)
        state = Scales(self.absmax, self.nested_absmax, self.nested_code, self.nested_offset).state(
            quant_type=self.quant_type, blocksize=self.blocksize, nested_blocksize=self.nested_blocksize,
            shape=(self.out_features, self.in_features), dtype=self.dtype,
        )  # fmt: skip
        return dequantise_4bit(self.weight.view(-1, 1), state).to(dtype)

    def serves(self, dtype: torch.dtype) -> bool:
        """Return whether a projection in `dtype` may use it as it is."""
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


_FP8_LINEAR_READS = ("block_size", "activation_scheme", "weight_scale_inv")


def is_fp8_linear(base: Any) -> bool:
    """Return whether a base layer is `FP8Linear` of ``transformers.integrations.finegrained_fp8``, by its name.

    Its weight is ``weight * weight_scale_inv``. By name, so that its module is not imported.
    """
    return type(base).__name__ == "FP8Linear"


def reason_against_layout(base: Any) -> str:
    """Return why the values of an `FP8Linear` cannot be multiplied as they are, with the remedy; empty if they can."""
    why = _reason(base)
    return why and f"{why}: load it with FineGrainedFP8Config(dequantize=True)"


def _reason(base: Any) -> str:
    if missing := [name for name in _FP8_LINEAR_READS if not hasattr(base, name)]:
        return f"an FP8 base without {', '.join(missing)}"
    if base.weight.dtype != FP8:
        return f"an FP8 base with weights in {base.weight.dtype}"
    if base.block_size is None or tuple(base.block_size) != (BLOCK, BLOCK):
        return f"an FP8 base whose scales are not of blocks of {BLOCK} x {BLOCK}"
    if base.activation_scheme != "dynamic":
        return "an FP8 base with fixed scales of activations"
    if any(size % BLOCK_MULTIPLE for size in base.weight.shape):
        return f"an FP8 base with dimensions that are no multiples of {BLOCK_MULTIPLE}"
    if base.weight.is_cuda and not _multiplies_blocks(base.weight.device):
        return "an FP8 base on a device or CUDA that multiplies no blocks (compute capability 9 and CUDA 12.9 do)"
    return ""


def _multiplies_blocks(device: torch.device) -> bool:
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == 9 and cuda >= (12, 9)


def fp8_linear_weight(base: Any, *, both_layouts: bool) -> Fp8Weight:
    """Return the weight of an `FP8Linear` whose layout has no reason against it; the values are its parameter's."""
    return Fp8Weight.of_blocks(base.weight.detach(), base.weight_scale_inv.detach(), both_layouts=both_layouts)


def loaded_weight(base: Any) -> BaseWeight:
    """Return the weight of a base layer by reference, (out_features, in_features): dense or 4-bit."""
    if type(base).__name__ == "Linear4bit":
        return from_4bit(base.weight)
    return BaseWeight(base.weight.data.t() if isinstance(base, Conv1D) else base.weight.data)


class HostWeight:
    """Takes the ``weight`` of a layer off its device until `restore`.

    The parameter keeps its shape, dtype and device, and has NaN in place of values, in no memory: a use that nobody
    thought of is seen at once. `state_dict` and a deep copy of the layer have the values. What is written to the
    parameter meanwhile stays.

    Args:
        layer: e.g. the base layer of a LoRA layer; nothing else may hold its weight.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameter = layer._parameters["weight"]
        assert parameter is not None
        self._parameter: nn.Parameter = parameter
        self._kept: Tensor | None = parameter.data.cpu()
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
        self._stub = parameter.data_ptr()
        me, own = weakref.ref(self), weakref.ref(layer)

        def give_values(layer: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
            host = me()
            # A deep copy of the layer has this hook too.
            if host is not None and layer is own() and f"{prefix}weight" in state and host._waits():
                state[f"{prefix}weight"] = host._values(torch.device("cpu"))

        def bring_back(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
            host = me()
            if host is not None and layer is own() and f"{prefix}weight" in state:  # loading writes into it
                host.restore()

        # Functions: torch marks the first, and takes no methods.
        self._hooks = [
            layer.register_state_dict_post_hook(give_values),
            layer.register_load_state_dict_pre_hook(bring_back),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._kept is None else self._kept.nbytes

    def restore(self, *, to_device: bool = True) -> None:
        """Bring the values back; a second call does nothing.

        Args:
            to_device: of the parameter; False leaves them in host memory.

        Raises:
            torch.OutOfMemoryError: the device has no room; everything is as it was.
        """
        if self._kept is None:
            return
        if self._waits():
            self._parameter.data = self._values(self._parameter.device if to_device else torch.device("cpu"))
        self._kept = None
        for hook in self._hooks:
            hook.remove()

    def _waits(self) -> bool:
        """Return whether the parameter has no values: NaN as they were put there, or moved or cast since."""
        data = self._parameter.data
        return data.data_ptr() == self._stub or bool(data.isnan().all())

    def _values(self, device: torch.device) -> Tensor:
        assert self._kept is not None
        return self._kept.to(device, self._parameter.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        if self._kept is not None and self._waits():
            copied = copy.deepcopy(self._parameter, memo)
            copied.data = self._kept.to(self._parameter.device, self._parameter.dtype, copy=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled layer has the values of its parameter


class HasFrozenWeight(nn.Module):
    """A LoRA layer that may multiply by a copy of its frozen weight, which is kept for the run."""

    fastpack_dense: BaseWeight | Fp8Weight | None = None
    """The copy, in the compute dtype or in FP8."""
    fastpack_copied_from: Any = None
    """The parameter that the copy was made from, with its version and address then."""
    fastpack_on_host: HostWeight | None = None
    """The frozen weight itself, where only its copy is on the device."""

    def merge(self, *args: Any, **kwargs: Any) -> Any:
        """Merge as PEFT; drop the kept copy of the base first: PEFT adds to ``weight.data``, which nothing counts."""
        self._fastpack_drop_copy()
        return super().merge(*args, **kwargs)

    def unmerge(self, *args: Any, **kwargs: Any) -> Any:
        """Unmerge as PEFT; see `merge`."""
        self._fastpack_drop_copy()
        return super().unmerge(*args, **kwargs)

    @property
    def fastpack_multiplies_in_fp8(self) -> bool:
        """True while the frozen weight in FP8 is that of the layer's parameter."""
        return isinstance(self.fastpack_dense, Fp8Weight) and self._fastpack_is_source(self.base_layer.weight)

    def _fastpack_keep_copy(self, copied: BaseWeight | Fp8Weight) -> None:
        """Multiply by this copy while the weight's parameter stays as it is now."""
        weight = self.base_layer.weight
        self.fastpack_dense = copied
        self.fastpack_copied_from = (weight, weight._version, weight.data_ptr())

    def _fastpack_fetch_weight(self) -> None:
        """Bring a frozen weight back from the host, for a call that needs it itself; a good copy of it stays good."""
        host, copied = self.fastpack_on_host, self.fastpack_dense
        if host is None:
            return
        good = copied is not None and self._fastpack_is_source(self.base_layer.weight)
        host.restore()
        del self.fastpack_on_host
        if copied is not None and good:
            self._fastpack_keep_copy(copied)
            logger.warning_once("frozen_base: loaded weights are back on the device, for calls without adapters")

    def _fastpack_drop_copy(self) -> None:
        self._fastpack_drop_dense()  # first: on a full device it makes room for the weight
        self._fastpack_fetch_weight()

    def _fastpack_drop_dense(self) -> None:
        self.__dict__.pop("fastpack_dense", None)
        self.__dict__.pop("fastpack_copied_from", None)

    def _fastpack_copy_is_good(self, weight: Tensor, dtype: torch.dtype) -> bool:
        copied = self.fastpack_dense
        return copied is not None and copied.serves(dtype) and self._fastpack_is_source(weight)

    def _fastpack_is_source(self, weight: Tensor) -> bool:
        source, version, address = self.fastpack_copied_from
        if source is not weight:
            return False  # merged and unmerged since: bitsandbytes made a new parameter
        return torch.compiler.is_compiling() or (version == weight._version and address == weight.data_ptr())
