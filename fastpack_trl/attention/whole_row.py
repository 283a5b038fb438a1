"""What kernels over a whole packed row share: their inputs, their operator, and its twin in plain torch.

On the CPU the operator runs the twin, so that everything around the kernel is tested without a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, described
from fastpack_trl.attention.operators import attention_operator, gather_keys, sink_gradient, tokens_of
from fastpack_trl.attention.per_document import FLASH_DTYPES
from fastpack_trl.attention.reference import (
    NO_SOFTCAP,
    NO_WINDOW,
    DocumentInputs,
    reference_backward,
    reference_forward,
    window_band,
)
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length

MAX_HEAD_DIM = 256
"""Of flash kernels."""


class RowInputs(NamedTuple):
    """Inputs of a kernel over a whole row, in the order of the operator's arguments."""

    query: Tensor
    """(total_tokens, num_heads, head_dim); head_dim a multiple of 8, at most `MAX_HEAD_DIM`."""
    key: Tensor
    """(total_keys, num_kv_heads, head_dim)."""
    value: Tensor
    """(total_keys, num_kv_heads, head_dim)."""
    cu_seqlens: Tensor
    """(num_segments + 1,) int32, on the device of the query."""
    sinks: Tensor | None
    """(num_heads,)."""
    window: int
    """Tokens that a query sees, itself included; 0: all before it."""
    scale: float
    max_seqlen: int
    """At least the longest segment."""
    cu_seqlens_k: Tensor | None = None
    """(num_segments + 1,) int32, on the device of the query: segments of the keys, aligned bottom-right with those of
    the queries. None: each token is a query and a key."""
    max_seqlen_k: int = 0
    """At least the most keys of a segment."""
    softcap: float = NO_SOFTCAP

    @property
    def segments(self) -> tuple[Tensor, Tensor, int, int]:
        """Return segments of queries and keys, and the longest of each, as torch's operators take them."""
        if self.cu_seqlens_k is None:
            return self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen
        return self.cu_seqlens, self.cu_seqlens_k, self.max_seqlen, self.max_seqlen_k

    @property
    def for_reference(self) -> DocumentInputs:
        """Return the same inputs in the layout of `reference.py`."""
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in self[:3])
        band = window_band(min(self.segments[-1], self.key.shape[0]), self.window)
        return DocumentInputs(
            q, k, v, self.cu_seqlens, self.sinks, band, self.window, self.scale, self.softcap, self.max_seqlen,
            self.cu_seqlens_k,
        )  # fmt: skip


def row_operator(
    forward: Callable[[RowInputs], tuple[Tensor, Tensor]],
    backward: Callable[[RowInputs, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
) -> Any:
    """Register the operators of a kernel (`attention_operator`) by its names; the result takes fields of `RowInputs`.

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

    return attention_operator(
        RowInputs, run, run_backward, fake=_fake, flops=_flops, flops_backward=_flops_backward,
        memory_format=torch.contiguous_format,
    )  # fmt: skip


def _twin(row: RowInputs) -> tuple[Tensor, Tensor]:
    with torch.autocast(row.query.device.type, enabled=False):
        outs, lses = reference_forward(row.for_reference)
    return outs[0], lses[0].contiguous()


def _twin_backward(
    row: RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = reference_backward(row.for_reference, grad_out[None], out[None], lse[None])
    dq, dk, dv = (grad[0].transpose(0, 1).contiguous() for grad in grads)
    return dq, dk, dv, sink_gradient(grad_out, out, lse, row.sinks)


def _fake(*fields: Any) -> tuple[Tensor, Tensor]:
    query = RowInputs(*fields).query
    total, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(heads, total, dtype=dtype)


# Lengths are on the device and are not asked for: an upper bound from the longest segment, never free.
def _flops(*fields: Any, **_keywords: Any) -> int:
    row = RowInputs(*fields)
    return int(4 * row.query.numel() * row.segments[-1])


def _flops_backward(_grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any, **_keywords: Any) -> int:
    return _flops(*fields) * 5 // 2


class RowLayer(NamedTuple):
    """Segments of a row, as a kernel over the whole row reads them: what crosses a layer boundary."""

    kernel: str
    """Its key in `KERNELS`."""
    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device, starting at 0."""
    max_seqlen: int
    cu_seqlens_k: Tensor
    """Of the keys; the same tensor if no segment has a prefix."""
    max_seqlen_k: int
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device, tokens of the row that are its keys (`SharedKeys`); None: its own tokens."""

    @classmethod
    def of(cls, kernel: str, batch: PackedBatch, device: torch.device) -> RowLayer:
        """Return the segments of a batch on a device."""
        ends, longest, shared = batch.cu_seqlens.to(device), batch.bucketed_max_seqlen, batch.shared
        if shared is None:
            return cls(kernel, ends, longest, ends, longest)
        keys = shared.map(lambda tensor: tensor.to(device))
        longest_k = rounded_length(keys.max_seqlen_k)
        return cls(kernel, ends, longest, keys.cu_seqlens_k, longest_k, keys.key_index)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend over the whole row.

        Raises:
            ValueError: a dtype, dropout or softcap that the kernel does not support; names the fix.
        """
        attention, softcap = KERNELS[self.kernel]
        check_call(self.kernel, call, softcap=softcap)
        query, *keyed = tokens_of(call)
        if self.key_index is not None:
            keyed = [gather_keys(tensor, self.key_index) for tensor in keyed]
        out, _ = attention(
            query, *keyed, self.cu_seqlens, call.sinks, call.window or NO_WINDOW, call.scale, self.max_seqlen,
            self.cu_seqlens_k, self.max_seqlen_k, call.softcap or NO_SOFTCAP,
        )  # fmt: skip
        return out[None, ..., : call.value.shape[-1]].contiguous()


KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], bool]] = {}
"""By name of the backend: its operator, and whether it supports a softcap. Each backend's file adds its own."""


def check_call(name: str, call: AttentionCall, *, softcap: bool) -> None:
    """Check that a kernel has what a call asks for, which one with a `softcap` takes too.

    Raises:
        ValueError: a dtype, dropout or softcap that the kernel does not have; names the remedy.
    """
    wrong_dtype = call.query.is_cuda and call.query.dtype not in FLASH_DTYPES
    # No message is made before it is needed: inside a graph these are symbols.
    if wrong_dtype or call.dropout or (call.softcap is not None and not softcap):
        what = f"dropout {call.dropout}" if call.dropout else f"softcap {call.softcap}"
        what = str(call.query.dtype).replace("torch.", "dtype ") if wrong_dtype else what
        raise ValueError(f"{name} has no {what}: set packed_attention='per_document' or 'sdpa'")


def reason_for(kernel: str, features: ModelFeatures) -> str:
    """Return what the report says: ``flash-attn-4, bfloat16, sm90; plain causal``."""
    dtype = str(features.compute_dtype).removeprefix("torch.")
    return f"{kernel}, {dtype}, sm{''.join(map(str, features.capability or ()))}; {described(features)}"
