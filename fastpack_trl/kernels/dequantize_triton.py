# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `fastpack_trl.kernels.dequantize`: scales of scales, scales and values in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch

_TILE = 1024
"""Packed bytes per program, four per thread: each loads 4 bytes and stores 16 (of 16-bit values)."""


@triton.jit
def _dequantize_kernel(
    packed, absmax, code, nested_absmax, nested_code, nested_offset, out, num_bytes, num_values,
    bytes_per_block: tl.constexpr, blocks_per_scale: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    # A row lies within one block, so that a scale is loaded once per row, not once per value.
    start = tl.program_id(0).to(tl.int64) * (rows * columns)
    first = start + tl.arange(0, rows) * columns
    block = first // bytes_per_block
    there = first < num_bytes
    if blocks_per_scale:  # the scales themselves are quantized
        index = tl.load(absmax + block, mask=there, other=0).to(tl.int32)
        scale = tl.load(nested_code + index) * tl.load(nested_absmax + block // blocks_per_scale, mask=there, other=0.0)
        scale += tl.load(nested_offset)
    else:
        scale = tl.load(absmax + block, mask=there, other=0.0)
    place = first[:, None] + tl.arange(0, columns)[None, :]
    if whole:
        pair = tl.load(packed + place).to(tl.int32)
    else:
        pair = tl.load(packed + place, mask=place < num_bytes, other=0).to(tl.int32)
    high = tl.load(code + (pair >> 4)) * scale[:, None]
    low = tl.load(code + (pair & 15)) * scale[:, None]
    values = tl.interleave(high, low).to(out.dtype.element_ty)
    place = 2 * first[:, None] + tl.arange(0, 2 * columns)[None, :]
    if whole:
        tl.store(out + place, values)
    else:
        tl.store(out + place, values, mask=place < num_values)


def dequantize_4bit_triton(packed: Tensor, state: Any, code: Tensor) -> Tensor:
    """Compute `dequantize_4bit` in one kernel.

    Args:
        packed, state: as there.
        code: (16,) fp32, the value of each half of a byte before scaling.
    """
    stored = packed.contiguous().view(-1).view(torch.uint8)
    out = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    inner = state.state2
    per_block = state.blocksize // 2
    columns = min(per_block, _TILE)
    num_values = out.numel()
    num_bytes = (num_values + 1) // 2
    launch(
        _dequantize_kernel, (triton.cdiv(num_bytes, _TILE),),
        stored, state.absmax, code,
        code if inner is None else inner.absmax,
        code if inner is None else inner.code,
        code if inner is None else state.offset,
        out, num_bytes, num_values,
        bytes_per_block=per_block, blocks_per_scale=0 if inner is None else inner.blocksize,
        rows=_TILE // columns, columns=columns, whole=num_values % (2 * _TILE) == 0,
        # bitsandbytes rounds both product and sum; a fused multiply-add would round once and give another scale.
        enable_fp_fusion=False, num_warps=_TILE // 128,
    )  # fmt: skip
    return out
