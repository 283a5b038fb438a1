# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of `fastpack_trl.kernels.combine`: each output row is written once, summed in fp32 in fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import launch

_MAX_COLUMNS = 1024


@triton.jit
def _combine_kernel(
    rows, more, inverse, weights, bias, ids, out, width,
    has_more: tl.constexpr, has_weights: tl.constexpr, has_bias: tl.constexpr,
    top_k: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    total = tl.zeros((columns,), dtype=tl.float32)
    for slot in tl.static_range(top_k):
        place = tl.load(inverse + token * top_k + slot).to(tl.int64)
        row = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if has_more:
            row += tl.load(more + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            expert = tl.load(ids + token * top_k + slot).to(tl.int64)
            row += tl.load(bias + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        if has_weights:
            row *= tl.load(weights + token * top_k + slot).to(tl.float32)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def combine_triton(
    rows_sh: Tensor, inverse_tk: Tensor, weights_tk: Tensor | None = None, *, more_sh: Tensor | None = None,
    bias_eh: Tensor | None = None, ids_tk: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute `combine` in one kernel."""
    tokens, top_k = inverse_tk.shape
    width = rows_sh.shape[1]
    out = torch.empty(tokens, width, dtype=dtype or rows_sh.dtype, device=rows_sh.device)
    if tokens:
        columns = min(_MAX_COLUMNS, triton.next_power_of_2(width))
        launch(
            _combine_kernel, (tokens, triton.cdiv(width, columns)),
            rows_sh.contiguous(), rows_sh if more_sh is None else more_sh.contiguous(), inverse_tk.contiguous(),
            rows_sh if weights_tk is None else weights_tk.contiguous(),
            rows_sh if bias_eh is None else bias_eh.contiguous(),
            inverse_tk if ids_tk is None else ids_tk.contiguous(), out, width,
            has_more=more_sh is not None, has_weights=weights_tk is not None, has_bias=bias_eh is not None,
            top_k=top_k, columns=columns,
        )  # fmt: skip
    return out
