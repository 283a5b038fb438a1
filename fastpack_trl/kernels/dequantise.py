"""Weights in bitsandbytes' 4-bit formats made dense by one kernel, bit-equal to `bitsandbytes.functional`.

Where the scales are quantised themselves (double quantisation), bitsandbytes launches three kernels: the scales made
fp32, their offset added, the values. Dettmers et al., QLoRA, arXiv:2305.14314, equations 3 and 6.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels._triton import DTYPES, has_triton, is_supported

logger = logging.getLogger(__name__)

_PROBED_BLOCKS = 600
"""More than two groups of 256 scales that share a scale."""


class Scales(NamedTuple):
    """The tensors of a `QuantState`: fp32 scales, or scales quantised themselves with what makes them fp32."""

    absmax: Tensor
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None

    @classmethod
    def of(cls, state: Any) -> Scales:
        """Return the tensors of bitsandbytes' `QuantState`, by reference."""
        if not state.nested:
            return cls(state.absmax)
        return cls(state.absmax, state.state2.absmax, state.state2.code, state.offset)

    def state(
        self, *, quant_type: str, blocksize: int, nested_blocksize: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Any:
        """Return a `QuantState` of these tensors and constants."""
        from bitsandbytes.functional import QuantState

        nested = {}
        if self.nested_absmax is not None:
            inner = QuantState(
                self.nested_absmax, code=self.nested_code, blocksize=nested_blocksize, dtype=torch.float32
            )
            nested = {"offset": self.nested_offset, "state2": inner}
        return QuantState(
            self.absmax, shape=torch.Size(shape), blocksize=blocksize, quant_type=quant_type, dtype=dtype, **nested
        )


def dequantise_4bit(packed: Tensor, state: Any) -> Tensor:
    """Return the dense weight: by one kernel where it gives the bits of bitsandbytes on this device, else by those.

    Args:
        packed: two values per byte, the first in the high half, in any storage dtype.
        state: bitsandbytes' `QuantState`, nf4 or fp4; its scales are fp32, or uint8 with a `state2` of their own.

    Returns:
        ``state.shape`` in ``state.dtype``, newly allocated.
    """
    # A graph takes the operators of bitsandbytes, which a compiler knows the results of.
    if not torch.compiler.is_compiling() and _covers(packed, state) and proven(packed, state):
        return _by_kernel(packed, state)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def _covers(packed: Tensor, state: Any) -> bool:
    inner = state.state2
    nested = inner is not None
    scales = [inner.absmax, inner.code, state.offset] if nested else [state.absmax]
    return (
        packed.is_cuda
        and has_triton()
        and is_supported(packed.device)
        and packed.shape[0] > 1  # (1, n) is a transposed layout of old checkpoints
        and state.dtype in DTYPES
        and state.absmax.dtype == (torch.uint8 if nested else torch.float32)
        and all(scale.dtype == torch.float32 for scale in scales)
        and all(scale.device == packed.device and scale.is_contiguous() for scale in (state.absmax, *scales))
    )


@lru_cache
def _code(quant_type: str, device: torch.device) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device=device)


def proven(packed: Tensor, state: Any) -> bool:
    """Return whether the kernel gives the bits of bitsandbytes for weights of this format on this device.

    The first weight of a format waits for a comparison; recorded into a CUDA graph, it is not compared.
    """
    nested = 0 if state.state2 is None else state.state2.blocksize
    form = _Format(packed.device, state.dtype, state.quant_type, state.blocksize, nested)
    found = _proofs.get(form)
    if found is None:
        if packed.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        # bitsandbytes quantises on the default stream, whichever is the current one.
        default = torch.cuda.default_stream(packed.device) if packed.is_cuda else None
        with torch.cuda.stream(default):  # None: as it is
            why = _difference(form)
        found = _proofs[form] = not why
        if why:
            logger.warning(
                f"4-bit weights ({form.quant_type}, blocks of {form.blocksize}, {form.dtype}): dequantised by "
                f"bitsandbytes, in up to three kernels ({why})"
            )
    return found


class _Format(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    quant_type: str
    blocksize: int
    nested_blocksize: int
    """Scales per scale of scales; 0 where scales are fp32."""


_proofs: dict[_Format, bool] = {}


def _difference(form: _Format) -> str:
    """Compare the kernel with bitsandbytes on random values; return why it cannot take its place, else nothing."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    length = _PROBED_BLOCKS * form.blocksize + 33  # the last block is not full, nor the last byte
    generator = torch.Generator(form.device).manual_seed(0)
    values = torch.randn(length, generator=generator, device=form.device).to(form.dtype)
    packed, state = quantize_4bit(
        values, blocksize=form.blocksize, quant_type=form.quant_type, compress_statistics=form.nested_blocksize > 0
    )
    if form.nested_blocksize and form.nested_blocksize != state.state2.blocksize:
        return f"scales in groups of {form.nested_blocksize}, which bitsandbytes does not make to compare with"
    try:
        found = _by_kernel(packed, state)
    except Exception as error:  # noqa: BLE001 - whatever Triton lacks on this machine
        return (f"{type(error).__name__}: {error}").splitlines()[0]
    return "" if torch.equal(found, dequantize_4bit(packed, state)) else "the values of one kernel differ"


def _by_kernel(packed: Tensor, state: Any) -> Tensor:
    from fastpack_trl.kernels.dequantise_triton import dequantise_4bit_triton

    return dequantise_4bit_triton(packed, state, _code(state.quant_type, packed.device))
