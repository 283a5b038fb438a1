"""torch's own variable-length flash kernel over a whole packed row: CUDA, bf16 and fp16, nothing to install.

`torch.nn.attention.varlen` wraps the same two operators; they are called directly, because its wrapper takes grouped
heads only from torch 2.12 on and passes no gradient through a corrected log-sum-exp.

A sink is one logit per head that takes part in the softmax and has no value (gpt-oss). It adds ``exp(sink)`` to the
denominator of each row and nothing to the sum, so with ``lse' = logaddexp(lse, sink)`` the output is
``out' = out * exp(lse - lse')``. The backward of a kernel without sinks computes ``exp(scores - lse')`` and
``rowsum(dout * out')``: given `out'` and `lse'` in place of `out` and `lse` it returns exact dQ, dK and dV.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.attention.row_backend import RowBackend, RowLayer
from fastpack_trl.attention.row_operator import RowInputs, row_operator
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch


def _in_kernel(row: RowInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return segments, and scale and window, as torch's operators take them: the window without the token itself."""
    segments = (row.cu_seqlens, row.cu_seqlens_k, row.max_seqlen, row.max_seqlen_k, 0.0, True)
    window = {"window_size_left": row.window - 1 if row.window else -1, "window_size_right": 0}
    return segments, {"scale": row.scale, **window}


def varlen_attention(row: RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    segments, keywords = _in_kernel(row)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*row[:3], *segments, False, **keywords)
    return fold_sinks(out, lse, row.sinks)


def varlen_attention_backward(
    row: RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `varlen_attention`."""
    segments, keywords = _in_kernel(row)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, *row[:3], out, lse, *segments, *_no_dropout(out.device, out.dtype), **keywords
    )
    return dq, dk, dv, sink_gradient(grad_out, out, lse, row.sinks)


@cache
def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the random state of no dropout, which the kernel takes and does not read: made once, not per layer."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device, dtype=dtype)


def fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks, if there are any, in the denominator.

    Args:
        out: (tokens, heads, head_dim), of a kernel without sinks; overwritten.
        lse: (heads, tokens), natural logarithm.
        sinks: (heads,).
    """
    if sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out *= torch.exp(lse - with_sink).transpose(0, 1)[..., None].to(out.dtype)
    return out, with_sink


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return ``-sum(exp(sink - lse') * rowsum(dout * out'))`` per head; an empty tensor if there are no sinks.

    Shapes as in `fold_sinks`, which returned `out` and `lse`.
    """
    if sinks is None:
        return grad_out.new_empty(0)
    delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(0, 1)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)


class Varlen(RowBackend):
    """The backend ``varlen``: CUDA from compute capability 8.0 on, bf16 or fp16, windows and sinks."""

    name, library, sees_blocks = "varlen", "torch's flash kernel", True
    kernel = row_operator(varlen_attention, varlen_attention_backward)
    generations, needs = range(8, 100), "8.0"

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        yield missing_reason(self.name)
        yield from super().why_not(features)

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        if can_index(bucket.tokens, features, bucket.segments):
            return ""
        return f"varlen's int32 backward cannot index {bucket.tokens} tokens in {bucket.segments} segments at once"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> RowLayer:
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
