"""torch's own variable-length flash kernel over a whole packed row: CUDA, bf16 and fp16, nothing to install.

`torch.nn.attention.varlen` wraps the same two operators; they are called directly, because its wrapper takes grouped
heads only from torch 2.12 on and passes no gradient through a corrected log-sum-exp (`sinks.py`). On the CPU the
operator runs its twin in plain torch, so that everything around the kernel is tested without a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.attention.reference import NO_SOFTCAP, NO_WINDOW, reference_backward, reference_forward
from fastpack_trl.attention.sinks import fold_sinks, pad_head, sink_gradient
from fastpack_trl.kernels.operators import differentiable, operator, signature_of
from fastpack_trl.packing.masks import band_mask
from fastpack_trl.packing.packed_batch import PackedBatch

MAX_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16)
_HEAD_ALIGNMENT = 8
# The varlen backward of FlashAttention-2 indexes a buffer of (total_q + 128 * num_seqs) * heads * round32(head_dim)
# elements with an int32.
_INT32 = 2**31
_BUFFER_ROWS_PER_SEGMENT = 128


class VarlenLayer(NamedTuple):
    """What crosses a layer boundary: one tensor and one int, or several of both for a row that int32 cannot index."""

    parts: tuple[tuple[Tensor, int, int, int], ...]
    """(cu_seqlens, max_seqlen, first token, end token): (num_segments + 1,) int32 on the device, starting at 0."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        module: Any = None,
    ) -> Tensor:
        """Shapes and results as `PerDocumentLayer.attend`.

        Raises:
            ValueError: a dtype, dropout or softcap that the kernel does not have; names the remedy.
        """
        wrong_dtype = query.is_cuda and query.dtype not in DTYPES
        # No message is made before it is needed: inside a graph these are symbols.
        if wrong_dtype or dropout or softcap is not None:
            what = f"dropout {dropout}" if dropout else f"softcap {softcap}"
            what = str(query.dtype).replace("torch.", "dtype ") if wrong_dtype else what
            raise ValueError(f"varlen has no {what}: set packed_attention='per_document' or 'sdpa'")
        value_dim = value.shape[-1]
        width = -(-max(query.shape[-1], value_dim) // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT
        tokens = [pad_head(tensor[0].transpose(0, 1), width) for tensor in (query, key, value)]
        if torch.compiler.is_compiling():
            # The kernel's results have the strides of its inputs, a graph expects rows one after the other. There the
            # kernel that writes them (rotary embedding) writes them so; eager it would be a copy, and is not needed.
            tokens = [tensor.contiguous() for tensor in tokens]
        outs = []
        for cu_seqlens, max_seqlen, start, end in self.parts:
            q, k, v = tokens if len(self.parts) == 1 else (tensor[start:end] for tensor in tokens)
            outs.append(_operator(q, k, v, cu_seqlens, sinks, window or NO_WINDOW, scale, max_seqlen)[0])
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out[None, ..., :value_dim].contiguous()


def prepare(batch: PackedBatch, device: torch.device, elements_per_token: int) -> VarlenLayer:
    """Cut the row where the kernel's backward could no longer index it; usually nowhere.

    Args:
        batch: the documents.
        device: where attention runs.
        elements_per_token: num_heads x round32(head_dim).

    Raises:
        ValueError: one document alone is too long for the kernel; names the remedy.
    """

    def build() -> VarlenLayer:
        bounds = part_bounds(batch.segment_lengths, elements_per_token)
        if len(bounds) == 1:
            return VarlenLayer(((batch.cu_seqlens.to(device), batch.bucketed_max_seqlen, 0, batch.total_tokens),))
        parts, token = [], 0
        for first, end in bounds:
            part = PackedBatch.from_lengths(batch.segment_lengths[first:end])
            parts.append((part.cu_seqlens.to(device), part.bucketed_max_seqlen, token, token + part.total_tokens))
            token += part.total_tokens
        return VarlenLayer(tuple(parts))

    return batch.derive(("varlen", device), build)


def can_index(length: int, elements_per_token: int) -> bool:
    """Whether the kernel's backward can index a segment of `length` tokens with an int32."""
    return (length + _BUFFER_ROWS_PER_SEGMENT) * elements_per_token < _INT32


def part_bounds(segment_lengths: tuple[int, ...], elements_per_token: int) -> list[tuple[int, int]]:
    """Runs of segments, (first, end), that the kernel's backward can index with an int32 each.

    Raises:
        ValueError: a segment that is too long on its own.
    """
    bounds, first, rows = [], 0, 0
    for index, length in enumerate(segment_lengths):
        needed = length + _BUFFER_ROWS_PER_SEGMENT
        if not can_index(length, elements_per_token):
            raise ValueError(
                f"a document of {length} tokens is too long for varlen's int32 backward ({elements_per_token} elements "
                f"per token): set packed_attention='per_document' or a smaller max_length"
            )
        if (rows + needed) * elements_per_token >= _INT32:
            bounds.append((first, index))
            first, rows = index, 0
        rows += needed
    return [*bounds, (first, len(segment_lengths))]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each segment of `cu_seqlens`.

    Args:
        query: (total_tokens, num_heads, head_dim); head_dim a multiple of 8, at most 256.
        key, value: (total_tokens, num_kv_heads, head_dim).
        cu_seqlens: (num_segments + 1,) int32, on the device of the query.
        sinks: (num_heads,) or None.
        window: tokens that a query sees, itself included; 0 for all before it.
        scale: factor of the scores.
        max_seqlen: at least the longest segment.

    Returns:
        (total_tokens, num_heads, head_dim), and the log-sum-exp, (num_heads, total_tokens) fp32.
    """
    if query.is_cuda:
        left = window - 1 if window else -1  # flash kernels do not count the token itself
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False,
            scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
    else:
        out, lse = _twin_forward(query, key, value, cu_seqlens, window, scale, max_seqlen)
    return fold_sinks(out, lse, sinks) if sinks is not None else (out, lse)


def varlen_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (an empty tensor where there are none)."""
    if query.is_cuda:
        left = window - 1 if window else -1
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, lse, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True,
            no_dropout, query.new_empty(0), scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
    else:
        grads = _twin_backward(grad_out, query, key, value, out, lse, cu_seqlens, window, scale, max_seqlen)
    return (*grads, sink_gradient(grad_out, out, lse, sinks))


def _twin_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, window: int, scale: float, max_seqlen: int
) -> tuple[Tensor, Tensor]:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        out, lse = reference_forward(q, k, v, cu_seqlens, None, _band(window, max_seqlen), window, scale, NO_SOFTCAP)
    return out[0], lse[0].contiguous()


def _twin_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    window: int, scale: float, max_seqlen: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    band = _band(window, max_seqlen)
    grads = reference_backward(
        grad_out[None], q, k, v, out[None], lse[None], cu_seqlens, band, window, scale, NO_SOFTCAP
    )
    return tuple(grad[0].transpose(0, 1).contiguous() for grad in grads)


def _band(window: int, max_seqlen: int) -> Tensor | None:
    if not window or max_seqlen <= window:
        return None
    return torch.zeros(max_seqlen, max_seqlen).masked_fill_(~band_mask(max_seqlen, window), -torch.inf)


def _fake(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, sinks: Any, window: int, scale: float,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(heads, total, dtype=dtype)


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    sinks: Tensor | None, window: int, scale: float, max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    sink_grad = torch.empty_like(sinks) if sinks is not None else grad_out.new_empty(0)
    dq, dk, dv = grads
    return dq, dk, dv, sink_grad


# Lengths are on the device and are not asked for: an upper bound from the longest segment, never free.
def _flops(query: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(4 * query.shape[0] * query.shape[1] * query.shape[2] * args[-1])


def _flops_backward(grad_out: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(10 * grad_out.shape[0] * grad_out.shape[1] * grad_out.shape[2] * args[-1])


_forward = operator(varlen_attention, fake=_fake, flops=_flops)
_backward = operator(varlen_attention_backward, fake=_fake_backward, flops=_flops_backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        query, key, value, cu_seqlens, sinks, *scalars = inputs
        out, lse = _forward(*inputs)
        ctx.save_for_backward(query, key, value, out, lse, cu_seqlens, sinks)
        ctx.scalars = scalars
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, cu_seqlens, sinks = ctx.saved_tensors
        dq, dk, dv, dsinks = _backward(
            grad_out.contiguous(), query, key, value, out, lse, cu_seqlens, sinks, *ctx.scalars
        )
        return dq, dk, dv, None, dsinks if sinks is not None else None, None, None, None


_operator = differentiable("varlen_attention_with_gradient", signature_of(varlen_attention), _Attention)
