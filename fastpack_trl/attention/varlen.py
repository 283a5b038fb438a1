"""torch's own variable-length flash kernel over a whole packed row: CUDA, bf16 and fp16, nothing to install.

`torch.nn.attention.varlen` wraps the same two operators; they are called directly, because its wrapper takes grouped
heads only from torch 2.12 on and passes no gradient through a corrected log-sum-exp (`varlen_common.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack_trl.attention import varlen_common as common
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch


class Varlen(common.RowBackend):
    """The backend ``varlen``: CUDA from compute capability 8.0 on, bf16 or fp16, windows and sinks."""

    name, library = "varlen", "torch's flash kernel"
    generations, needs = range(8, 100), "8.0"

    def refuses(self, features: ModelFeatures) -> str:
        return missing_reason(self.name) or super().refuses(features)

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        if can_index(bucket.tokens, features, bucket.segments):
            return ""
        return f"varlen's int32 backward cannot index {bucket.tokens} tokens in {bucket.segments} segments at once"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> common.RowLayer:
        """Return the segments of the row.

        Raises:
            ValueError: the row is too long for the kernel's backward; names the fix.
        """
        segments = len(batch.cu_seqlens) - 1
        if not can_index(batch.total_tokens, features, segments):
            raise ValueError(
                f"a row of {batch.total_tokens:,} tokens in {segments:,} segments is too long for varlen's int32 "
                "backward: set packed_attention='per_document', or a smaller max_length"
            )
        return super().prepare(batch, features, device)


def can_index(tokens: int, features: ModelFeatures, segments: int) -> bool:
    """Return whether the kernel's backward can index so many tokens and segments, empty ones too, with an int32.

    FlashAttention-2 has a buffer of (total_q + 128 * num_seqs) * heads * round32(head_dim) elements.
    """
    return (tokens + 128 * segments) * features.num_heads * (-(-features.head_dim // 32) * 32) < 2**31


def _in_kernel(row: common.RowInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return segments, and scale and window, as torch's operators take them: the window without the token itself."""
    segments = (row.cu_seqlens, row.cu_seqlens_k, row.max_seqlen, row.max_seqlen_k, 0.0, True)
    window = {"window_size_left": row.window - 1 if row.window else -1, "window_size_right": 0}
    return segments, {"scale": row.scale, **window}


def varlen_attention(row: common.RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    segments, keywords = _in_kernel(row)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*row[:3], *segments, False, **keywords)
    return common.fold_sinks(out, lse, row.sinks)


def varlen_attention_backward(
    row: common.RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `varlen_attention`."""
    segments, keywords = _in_kernel(row)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=out.device), out.new_empty(0)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, *row[:3], out, lse, *segments, *no_dropout, **keywords
    )
    return dq, dk, dv, common.sink_gradient(grad_out, out, lse, row.sinks)


common.KERNELS["varlen"] = (common.row_operator(varlen_attention, varlen_attention_backward), False)
