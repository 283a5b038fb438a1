"""flash-attn-4 over a whole packed row: Hopper and Blackwell, two thirds of the time of torch's kernel.

Its kernels are compiled at the first call. Its two functions are called inside of an operator of ours, as a compiled or
a recorded layer needs them; sinks, windows and softcap are in the kernel. On the CPU the operator runs its twin in
plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.attention.operators import attention_operator, gather_keys, sink_gradient, tokens_of
from fastpack_trl.attention.per_document import FLASH_DTYPES
from fastpack_trl.attention.reference import (
    NO_SOFTCAP,
    NO_WINDOW,
    DocumentInputs,
    additive,
    band_mask,
    reference_backward,
    reference_forward,
)
from fastpack_trl.errors import first_reason
from fastpack_trl.measure.payback import StartUpCost
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import found
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length

NAME = "flash_attention_4"
MAX_HEAD_DIM = 256
COMPILE_SECONDS = 6.0
"""Of forward and backward of one kind of attention, before the first call: 4.5 to 7.2 s on the host of an H200."""
SAVED_PER_ELEMENT = 12e-12
"""Seconds less than torch's kernel, forward and backward, per element of the query of a row of many documents: 0.20 ms
of 16/8 heads of 128 over 8,192 tokens, and of 32/8 over 4,096 (H200)."""
_CAPABILITIES = (9, 10, 11, 12)
_FORWARD, _BACKWARD = (f"flash_attn.cute.interface._flash_attn_{way}" for way in ("fwd", "bwd"))
_function = cache(found)


class RowInputs(NamedTuple):
    """Inputs of the kernel, in the order of the operator's arguments."""

    query: Tensor
    """(total_tokens, num_heads, head_dim); head_dim a multiple of 8."""
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
    softcap: float
    """0: none."""
    max_seqlen: int
    """At least the longest segment."""
    cu_seqlens_k: Tensor
    """(num_segments + 1,) int32: segments of the keys, aligned bottom-right with those of the queries."""
    max_seqlen_k: int

    @property
    def in_kernel(self) -> dict[str, Any]:
        """Return what forward and backward take alike; the kernel does not count the token itself in a window."""
        window = {"window_size_left": self.window - 1, "window_size_right": 0} if self.window else {}
        return {
            "cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens_k, "max_seqlen_q": self.max_seqlen,
            "max_seqlen_k": self.max_seqlen_k, "softmax_scale": self.scale, "softcap": self.softcap, "causal": True,
            "learnable_sink": self.sinks, **window,
        }  # fmt: skip

    @property
    def for_reference(self) -> DocumentInputs:
        """Return the same inputs in the layout of `reference.py`."""
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in self[:3])
        longest = min(self.max_seqlen_k, self.key.shape[0])
        band = additive(band_mask(longest, self.window)) if self.window and longest > self.window else None
        return DocumentInputs(
            q,
            k,
            v,
            self.cu_seqlens,
            self.sinks,
            band,
            self.window,
            self.scale,
            self.softcap,
            self.max_seqlen,
            self.cu_seqlens_k,
        )


def flash4_attention(*fields: Any) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment from the fields of `RowInputs`.

    Returns:
        (total_tokens, num_heads, head_dim), and the log-sum-exp with the sinks, (num_heads, total_tokens) fp32.
    """
    row = RowInputs(*fields)
    if row.query.is_cuda:
        out, lse, *_ = _function(_FORWARD)(*row[:3], return_lse=True, **row.in_kernel)
        return out, lse
    with torch.autocast(row.query.device.type, enabled=False):
        outs, lses = reference_forward(row.for_reference)
    return outs[0], lses[0].contiguous()


def flash4_attention_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (an empty tensor if there are none)."""
    row = RowInputs(*fields)
    if row.query.is_cuda:
        dq, dk, dv, *dsinks = _function(_BACKWARD)(
            *row[:3], out, grad_out, lse, deterministic=torch.are_deterministic_algorithms_enabled(), **row.in_kernel
        )
        return dq, dk, dv, dsinks[0] if dsinks else row.query.new_empty(0)
    grads = reference_backward(row.for_reference, grad_out[None], out[None], lse[None])
    dq, dk, dv = (grad[0].transpose(0, 1).contiguous() for grad in grads)
    return dq, dk, dv, sink_gradient(grad_out, out, lse, row.sinks)


def _fake(*fields: Any) -> tuple[Tensor, Tensor]:
    query = RowInputs(*fields).query
    total, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(heads, total, dtype=dtype)


def _flops(*fields: Any, **_keywords: Any) -> int:
    row = RowInputs(*fields)
    return int(4 * row.query.numel() * row.max_seqlen_k)  # an upper bound: the device is not asked for lengths


def _flops_backward(_grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any, **_keywords: Any) -> int:
    return _flops(*fields) * 5 // 2


_attention = attention_operator(
    RowInputs, flash4_attention, flash4_attention_backward, fake=_fake, flops=_flops, flops_backward=_flops_backward,
    memory_format=torch.contiguous_format,
)  # fmt: skip


class FlashAttention4Layer(NamedTuple):
    """Tensors and ints: what crosses a layer boundary."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device."""
    max_seqlen: int
    cu_seqlens_k: Tensor
    """Of the keys; the same tensor where no segment has a prefix."""
    max_seqlen_k: int
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device (`SharedKeys`); None: each token is a key."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend over the whole row.

        Raises:
            ValueError: a dtype or dropout that the kernel does not have; names the remedy.
        """
        if call.dropout or (call.query.is_cuda and call.query.dtype not in FLASH_DTYPES):
            what = f"dropout {call.dropout}" if call.dropout else str(call.query.dtype).replace("torch.", "dtype ")
            raise ValueError(f"{NAME} has no {what}: set packed_attention='per_document' or 'sdpa'")
        query, *keyed = tokens_of(call)
        if self.key_index is not None:
            keyed = [gather_keys(tensor, self.key_index) for tensor in keyed]
        out, _ = _attention(
            query, *keyed, self.cu_seqlens, call.sinks, call.window or NO_WINDOW, call.scale,
            call.softcap or NO_SOFTCAP, self.max_seqlen, self.cu_seqlens_k, self.max_seqlen_k,
        )  # fmt: skip
        return out[None, ..., : call.value.shape[-1]].contiguous()


class FlashAttention4(Backend):
    """The backend ``flash_attention_4``: CUDA from compute capability 9.0 on, bf16 or fp16, with windows and sinks."""

    name = NAME
    flattens = True
    block_cost = 1e-4

    def refuses(self, features: ModelFeatures) -> str:
        return first_reason(self._lacks(features))

    def _lacks(self, features: ModelFeatures) -> Iterator[object]:
        yield features.device_type != "cuda" and f"{NAME} needs CUDA, the model is on {features.device_type}"
        if not has_device(features):
            has = ".".join(map(str, features.capability or ()))
            yield f"{NAME} needs compute capability 9.0 or higher, this device has {has}"
        yield (
            features.compute_dtype not in FLASH_DTYPES
            and f"{NAME} needs bf16 or fp16, this run computes in {str(features.compute_dtype).removeprefix('torch.')}"
        )
        too_wide = features.head_dim > MAX_HEAD_DIM
        yield too_wide and f"head_dim {features.head_dim} is over {NAME}'s limit of {MAX_HEAD_DIM}"
        yield features.dropout and f"{NAME} has no dropout, the model's is {features.dropout}"
        yield not _is_installed() and f"{NAME} is not installed: pip install --pre 'fastpack-trl[fa4]'"
        missing = [path for path in (_FORWARD, _BACKWARD) if found(path) is None]
        yield missing and f"the installed flash-attn-4 has no {', '.join(missing)}, or cannot be imported"

    def considered(self, features: ModelFeatures) -> bool:
        return has_device(features)

    def too_costly(self, features: ModelFeatures, elements: float) -> str:
        cost = StartUpCost(COMPILE_SECONDS, SAVED_PER_ELEMENT * elements)
        return "" if cost.pays(1) else f"{NAME} would be compiled for longer than it saves in this run"

    def reason(self, features: ModelFeatures) -> str:
        dtype = str(features.compute_dtype).removeprefix("torch.")
        return f"flash-attn-4, {dtype}, sm{''.join(map(str, features.capability or ()))}; {described(features)}"

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        return ""

    def refuses_shared(self, features: ModelFeatures) -> str:
        return ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> FlashAttention4Layer:
        ends, longest, shared = batch.cu_seqlens.to(device), batch.bucketed_max_seqlen, batch.shared
        if shared is None:
            return FlashAttention4Layer(ends, longest, ends, longest)
        keys = shared.map(lambda tensor: tensor.to(device))
        return FlashAttention4Layer(ends, longest, keys.cu_seqlens_k, rounded_length(keys.max_seqlen_k), keys.key_index)


def has_device(features: ModelFeatures) -> bool:
    """Return whether the kernel has code for the device of a model."""
    return features.device_type == "cuda" and (features.capability or (0, 0))[0] in _CAPABILITIES


def _is_installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
