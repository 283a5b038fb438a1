"""A kernel over a whole packed row as one operator with a gradient: its inputs, and a twin in plain torch.

On the CPU the operator runs the twin, so that everything around the kernel is tested without a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.attention.reference import NO_SOFTCAP, NO_WINDOW, band_mask, document_attention
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator, recording

MAX_HEAD_DIM = 256
"""Of flash kernels."""
HEAD_ALIGNMENT = 8


class RowInputs(NamedTuple):
    """Inputs of a kernel over a whole row, in the order of the operator's arguments."""

    query: Tensor
    """(total_tokens, num_heads, head_dim); head_dim a multiple of 8, at most `MAX_HEAD_DIM`."""
    key: Tensor
    """(total_keys, num_kv_heads, head_dim)."""
    value: Tensor
    """(total_keys, num_kv_heads, head_dim)."""
    sinks: Tensor | None
    """(num_heads,)."""
    cu_seqlens: Tensor
    """(num_segments + 1,) int32, on the device of the query."""
    cu_seqlens_k: Tensor
    """(num_segments + 1,) int32, on the device of the query: segments of the keys, aligned bottom-right with those of
    the queries."""
    max_seqlen: int
    """At least the longest segment."""
    max_seqlen_k: int
    """At least the most keys of a segment."""
    scale: float
    window: int = NO_WINDOW
    """Tokens that a query sees, itself included; 0: all before it."""
    softcap: float = NO_SOFTCAP


_TENSORS = 6
"""First fields of `RowInputs`; the first four have gradients."""

Forward = Callable[[RowInputs], tuple[Tensor, Tensor]]
Backward = Callable[[RowInputs, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def row_operator(forward: Forward, backward: Backward) -> Any:
    """Register two operators and their gradient; return ``(*RowInputs) -> (out, log-sum-exp)``, the latter without one.

    Args:
        forward: on CUDA; returns (total_tokens, num_heads, head_dim), and the log-sum-exp with the sinks,
            (num_heads, total_tokens) fp32.
        backward: on CUDA, also given ``grad_out, out, lse``; returns the gradients of query, key, value and sinks (an
            empty tensor if there are none).
    """

    @wraps(forward)
    def run(*fields: Any) -> tuple[Tensor, Tensor]:
        row = RowInputs(*fields)
        return forward(row) if row.query.is_cuda else _twin(row)

    @wraps(backward)
    def run_backward(grad_out: Tensor, out: Tensor, lse: Tensor, *fields: Any) -> tuple[Tensor, ...]:
        row = RowInputs(*fields)
        return (backward if row.query.is_cuda else _twin_backward)(row, grad_out, out, lse)

    arguments = arguments_of(RowInputs)
    inner = operator(run, fake=_fake, flops=_flops, signature=f"({arguments}) -> (Tensor, Tensor)")
    inner_backward = operator(
        run_backward, fake=_fake_backward, flops=_flops_backward,
        signature=f"(Tensor grad_out, Tensor out, Tensor lse, {arguments}) -> (Tensor, Tensor, Tensor, Tensor)",
    )  # fmt: skip

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
            out, lse = inner(*fields)
            ctx.save_for_backward(out, lse, *fields[:_TENSORS])
            ctx.constants = fields[_TENSORS:]
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)  # no zeros for `lse` in backward
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
            out, lse, *tensors = ctx.saved_tensors
            *gradients, sinks = inner_backward(grad_out.contiguous(), out, lse, *tensors, *ctx.constants)
            nothing = [None] * (len(RowInputs._fields) - 4)
            return *gradients, None if tensors[3] is None else sinks, *nothing

    return differentiable(f"{forward.__name__}_with_gradient", f"({arguments}) -> (Tensor, Tensor)", Attention)


def _twin(row: RowInputs) -> tuple[Tensor, Tensor]:
    """Reference in plain torch, segment by segment; values that a kernel leaves uninitialized are NaN.

    That is: tokens of no segment, and of a segment longer than `max_seqlen`, by which kernels size their grid.
    """
    total, heads, _ = row.query.shape
    out = row.query.new_full((total, heads, row.value.shape[2]), torch.nan)
    lse = out.new_full((heads, total), torch.nan, dtype=torch.promote_types(out.dtype, torch.float32))
    with torch.autocast(out.device.type, enabled=False):
        queries, keys = (pairwise(bounds.tolist()) for bounds in (row.cu_seqlens, row.cu_seqlens_k))
        for (start, stop), (first, last) in zip(queries, keys, strict=True):
            if not 0 < stop - start <= row.max_seqlen:
                continue
            tensors = (row.query[start:stop], row.key[first:last], row.value[first:last])
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
            mask = band_mask(last - first, row.window or last - first)[start - stop :]
            found = document_attention(query, key, value, mask, row.scale, row.sinks, row.softcap)
            out[start:stop], lse[:, start:stop] = found[0][0].transpose(0, 1), found[1][0]
    return out, lse


def _twin_backward(row: RowInputs, grad_out: Tensor, _out: Tensor, _lse: Tensor) -> tuple[Tensor, ...]:
    """Differentiate `_twin`."""
    # Hooks on the tensors that the step saves are not for those of this twin.
    with recording(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        leaves = [tensor.detach().contiguous().requires_grad_() for tensor in row[:4] if tensor is not None]
        out, _ = _twin(RowInputs(*leaves, *row[len(leaves) :]))
        query, key, value, *sinks = torch.autograd.grad(out, leaves, grad_out)
    return query, key, value, sinks[0] if sinks else query.new_empty(0)


def _fake(*fields: Any) -> tuple[Tensor, Tensor]:
    query = RowInputs(*fields).query
    total, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(heads, total, dtype=dtype)


def _fake_backward(grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    row = RowInputs(*fields)
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in row[:3]]
    return *gradients, grad_out.new_empty(0) if row.sinks is None else torch.empty_like(row.sinks)


# Reading lengths would synchronize: an upper bound from the longest segment, so that no partitioner takes it for free.
def _flops(*fields: Any, **_keywords: Any) -> int:
    row = RowInputs(*fields)
    return int(4 * row.query.numel() * row.max_seqlen_k)


def _flops_backward(_grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any, **_keywords: Any) -> int:
    return _flops(*fields) * 5 // 2
