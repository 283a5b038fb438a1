"""Dense weights from bitsandbytes' 4-bit formats by one kernel, bit-equal to `bitsandbytes.functional`.

If the scales are quantized themselves (double quantization), bitsandbytes launches three kernels: the scales in fp32,
their offset, the values. Dettmers et al., QLoRA, arXiv:2305.14314, equations 3 and 6.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels._triton import DTYPES, has_triton, is_supported


class Scales(NamedTuple):
    """The tensors of a `QuantState`: fp32 scales, or quantized scales with the tensors that dequantize them."""

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


def dequantize_4bit(packed: Tensor, state: Any) -> Tensor:
    """Return the dense weight. One kernel on CUDA; bitsandbytes on other devices and in a compiled graph.

    Args:
        packed: two values per byte, the first in the high half, in any storage dtype.
        state: bitsandbytes' `QuantState`, nf4 or fp4; its scales are fp32, or uint8 with a `state2` of their own.

    Returns:
        ``state.shape`` in ``state.dtype``, newly allocated.
    """
    # A compiler knows the results of bitsandbytes' operators.
    if not torch.compiler.is_compiling() and _has_kernel(packed, state):
        from fastpack_trl.kernels.dequantize_triton import dequantize_4bit_triton

        return dequantize_4bit_triton(packed, state, _code(state.quant_type, packed.device))
    from bitsandbytes import functional

    dense: Tensor = functional.dequantize_4bit(packed, state)
    return dense


def _has_kernel(packed: Tensor, state: Any) -> bool:
    inner = state.state2
    scales = [state.absmax] if inner is None else [inner.absmax, inner.code, state.offset]
    return (
        packed.is_cuda
        and has_triton()
        and is_supported(packed.device)
        and packed.shape[0] > 1  # (1, n) is a transposed layout of old checkpoints
        and state.dtype in DTYPES
        and state.absmax.dtype == (torch.float32 if inner is None else torch.uint8)
        and all(scale.dtype == torch.float32 for scale in scales)
        and all(scale.device == packed.device and scale.is_contiguous() for scale in (state.absmax, *scales))
    )


@lru_cache
def _code(quant_type: str, device: torch.device) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device=device)
