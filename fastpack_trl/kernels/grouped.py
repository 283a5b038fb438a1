"""Matmuls of row groups with one matrix each: torch's grouped GEMM if it supports them, else one matmul per group."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.kernels._triton import DTYPES

_ON_DEVICE = (9, 10)
"""Major compute capabilities on which torch's kernel for bf16 reads its offsets itself; elsewhere torch loops."""
ALIGNMENT = 16
"""Bytes that each stride of an operand of torch's grouped GEMM must be a multiple of."""


def aligned_rank(rank: int, dtype: torch.dtype) -> int:
    """Round `rank` up so that a row of that many elements is a multiple of 16 bytes: 4 in bf16 becomes 8."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-rank // step) * step


Offsets: TypeAlias = Tensor | tuple[int, ...]
"""End of each group's rows, (E,) int32 on the device or ints on the host; the last one is the number of rows."""


def reads_offsets(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's grouped GEMM reads its offsets on the host: not in bf16 on Hopper and Blackwell."""
    return device.type == "cuda" and not (
        dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in _ON_DEVICE
    )


def offsets_for(offsets_e: Tensor, dtype: torch.dtype) -> Offsets:
    """Return offsets for several matmuls in `dtype`, read to the host once if each matmul would read them."""
    return tuple(offsets_e.tolist()) if reads_offsets(dtype, offsets_e.device) else offsets_e


def grouped_mm(x_sk: Tensor, weight_ekn: Tensor, offsets_e: Offsets) -> Tensor:
    """Multiply the rows of group e by matrix e.

    Args:
        x_sk: (S, K), rows sorted by group.
        weight_ekn: (E, K, N), of the dtype of `x_sk`; may be a transposed view.
        offsets_e: of the S rows.

    Returns:
        (S, N) in the same dtype.
    """
    if isinstance(offsets_e, Tensor) and _torch_takes(x_sk, weight_ekn):
        return F.grouped_mm(x_sk, weight_ekn, offs=offsets_e)
    out = x_sk.new_empty(x_sk.shape[0], weight_ekn.shape[2])
    for expert, (start, end) in enumerate(_bounds(offsets_e)):
        torch.mm(x_sk[start:end], weight_ekn[expert], out=out[start:end])
    return out


def grouped_outer(x_sk: Tensor, y_sn: Tensor, offsets_e: Offsets) -> Tensor:
    """Return ``x^T y`` of each group's rows: (E, K, N), zero for a group without rows.

    Args:
        x_sk: (S, K), rows sorted by group.
        y_sn: (S, N), of the same dtype.
        offsets_e: of the S rows.
    """
    if isinstance(offsets_e, Tensor) and _torch_takes(x_sk, y_sn):
        return F.grouped_mm(x_sk.t(), y_sn, offs=offsets_e)
    out = x_sk.new_empty(len(offsets_e), x_sk.shape[1], y_sn.shape[1])
    for expert, (start, end) in enumerate(_bounds(offsets_e)):
        torch.mm(x_sk[start:end].t(), y_sn[start:end], out=out[expert])
    return out


def grouped_sum(x_sn: Tensor, offsets_e: Offsets, weights_s: Tensor | None = None) -> Tensor:
    """Sum each group's rows, weighted on request: (E, N). Deterministic, accumulated in fp32 by the grouped GEMM."""
    # A matmul with one column, padded to the alignment, because `index_add` is non-deterministic on CUDA.
    column = x_sn.new_zeros(x_sn.shape[0], aligned_rank(1, x_sn.dtype))
    column[:, 0] = 1 if weights_s is None else weights_s
    return grouped_outer(column, x_sn, offsets_e)[:, 0]


def _torch_takes(a: Tensor, b: Tensor) -> bool:
    strides = [stride for tensor in (a, b) for stride in tensor.stride() if stride != 1]
    return len(a) > 0 and a.dtype in DTYPES and all(stride * a.itemsize % ALIGNMENT == 0 for stride in strides)


def _bounds(offsets_e: Offsets) -> list[tuple[int, int]]:
    # A tensor is read on the host; this happens only for fp64, unaligned shapes or no rows.
    ends = offsets_e.tolist() if isinstance(offsets_e, Tensor) else offsets_e
    return list(zip([0, *ends], ends, strict=False))
