"""torch's own variable-length flash kernel over a whole packed row: CUDA, bf16 and fp16, nothing to install.

`torch.nn.attention.varlen` wraps the same two operators; they are called directly, because its wrapper takes grouped
heads only from torch 2.12 on and passes no gradient through a corrected log-sum-exp (`varlen_common.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.attention import varlen_common as common
from fastpack_trl.attention.interface import Backend
from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch

# The varlen backward of FlashAttention-2 indexes a buffer of (total_q + 128 * num_seqs) * heads * round32(head_dim)
# elements with an int32.
_INT32 = 2**31
_BUFFER_ROWS_PER_SEGMENT = 128


class Varlen(Backend):
    """The backend ``varlen``: CUDA from compute capability 8.0 on, bf16 or fp16, windows and sinks."""

    name = "varlen"
    flattens = True

    def refuses(self, features: ModelFeatures) -> str:
        if missing := missing_reason("varlen"):
            return missing
        reason = first_reason(self._lacks(features))
        return reason and f"varlen {reason}"

    def _lacks(self, features: ModelFeatures) -> Iterator[object]:
        needed, capability = _dotted(common.FLASH_CAPABILITY), features.capability
        dtype = str(features.compute_dtype).removeprefix("torch.")
        yield features.device_type != "cuda" and f"needs CUDA, the model is on {features.device_type}"
        low = capability is not None and capability < common.FLASH_CAPABILITY
        yield low and f"needs compute capability {needed}, this device has {_dotted(capability)}"
        yield (
            features.compute_dtype not in common.FLASH_DTYPES
            and f"needs bf16 or fp16, this run computes in {dtype} (bf16=False?)"
        )
        too_wide = features.head_dim > common.MAX_HEAD_DIM
        yield too_wide and f"head_dim {features.head_dim} is over its limit of {common.MAX_HEAD_DIM}"
        yield features.dropout and f"has no dropout, the model's is {features.dropout}"
        yield features.softcap and "has no softcap"

    def reason(self, features: ModelFeatures) -> str:
        return common.reason_for("torch's flash kernel", features)

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        if can_index(bucket.tokens, elements_per_token(features), bucket.segments):
            return ""
        return f"varlen's int32 backward cannot index {bucket.tokens} tokens in {bucket.segments} segments at once"

    def refuses_shared(self, features: ModelFeatures) -> str:
        return ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> common.RowLayer:
        """Return the segments of the row.

        Raises:
            ValueError: the row is too long for the kernel's backward; names the fix.
        """
        segments = len(batch.cu_seqlens) - 1
        if not can_index(batch.total_tokens, elements_per_token(features), segments):
            raise ValueError(
                f"a row of {batch.total_tokens:,} tokens in {segments:,} segments is too long for varlen's int32 "
                "backward: set packed_attention='per_document', or a smaller max_length"
            )
        return common.RowLayer.of("varlen", batch, device)


def elements_per_token(features: ModelFeatures) -> int:
    """Return the elements of the kernel's backward buffer per token: num_heads x round32(head_dim)."""
    return features.num_heads * (-(-features.head_dim // 32) * 32)


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def can_index(tokens: int, elements_per_token: int, segments: int = 1) -> bool:
    """Return whether the kernel's backward can index so many tokens and segments, empty ones too, with an int32."""
    return (tokens + _BUFFER_ROWS_PER_SEGMENT * segments) * elements_per_token < _INT32


def _in_kernel(row: common.RowInputs) -> dict[str, Any]:
    """Return scale and window as torch's operators take them: flash kernels do not count the token itself."""
    return {"scale": row.scale, "window_size_left": row.window - 1 if row.window else -1, "window_size_right": 0}


def varlen_attention(row: common.RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        row.query, row.key, row.value, *row.segments, 0.0, True, False, **_in_kernel(row)
    )
    return common.fold_sinks(out, lse, row.sinks)


def varlen_attention_backward(
    row: common.RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return its gradients."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=row.query.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, row.query, row.key, row.value, out, lse, *row.segments, 0.0, True, no_dropout,
        row.query.new_empty(0), **_in_kernel(row),
    )  # fmt: skip
    return dq, dk, dv, common.sink_gradient(grad_out, out, lse, row.sinks)


common.KERNELS["varlen"] = (common.row_operator(varlen_attention, varlen_attention_backward), False)
