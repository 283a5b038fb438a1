"""What kernels over a whole packed row share: their inputs, one operator with a gradient, and a twin in plain torch.

On the CPU the operator runs the twin, so that everything around the kernel is tested without a device.

A sink is one logit per head that takes part in the softmax and has no value (gpt-oss). It adds ``exp(sink)`` to the
denominator of each row and nothing to the sum, so with ``lse' = logaddexp(lse, sink)`` the output is
``out' = out * exp(lse - lse')``. The backward of a kernel without sinks computes ``exp(scores - lse')`` and
``rowsum(dout * out')``: given `out'` and `lse'` in place of `out` and `lse` it returns exact dQ, dK and dV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.attention.reference import NO_SOFTCAP, NO_WINDOW, band_mask, document_attention
from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator, recording
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length

MAX_HEAD_DIM = 256
"""Of flash kernels."""
HEAD_ALIGNMENT = 8
FLASH_DTYPES = (torch.bfloat16, torch.float16)


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
        for start, stop, first, last in _segments(row):
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


def _segments(row: RowInputs) -> list[tuple[int, int, int, int]]:
    """Return the bounds of queries and keys of each segment on the host: not empty, within `max_seqlen`."""
    queries, keys = (pairwise(bounds.tolist()) for bounds in (row.cu_seqlens, row.cu_seqlens_k))
    bounds = ((*own, *keyed) for own, keyed in zip(queries, keys, strict=True))
    return [each for each in bounds if 0 < each[1] - each[0] <= row.max_seqlen]


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


class RowLayer(NamedTuple):
    """Segments of a row for a kernel over the whole row; crosses a layer boundary."""

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
            ValueError: dropout or a softcap, which the kernel does not support; names the fix.
        """
        attention, has_softcap = KERNELS[self.kernel]
        if call.dropout or (call.softcap is not None and not has_softcap):
            what = "dropout" if call.dropout else "softcap"
            raise ValueError(f"{self.kernel} has no {what}: set packed_attention='per_document' or 'sdpa'")
        width = -(-max(call.query.shape[-1], call.value.shape[-1]) // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
        tensors = [tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value)]
        # Zeros change no score, and no value before them.
        padded = [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors]
        if torch.compiler.is_compiling():
            # The kernel's results have the strides of its inputs, a graph expects rows one after the other. There the
            # kernel that writes them (rotary embedding) writes them so; eager it would be a copy, and is not needed.
            padded = [tensor.contiguous() for tensor in padded]
        query, *keyed = padded
        if self.key_index is not None:
            keyed = [gather_keys(tensor, self.key_index) for tensor in keyed]
        out, _ = attention(
            query, *keyed, call.sinks, self.cu_seqlens, self.cu_seqlens_k, self.max_seqlen, self.max_seqlen_k,
            call.scale, call.window or NO_WINDOW, call.softcap or NO_SOFTCAP,
        )  # fmt: skip
        return out[None, ..., : call.value.shape[-1]].contiguous()


KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], bool]] = {}
"""By name of the backend: its operator, and whether it supports a softcap. Each backend's file adds its own."""


def gather_keys(tensor: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Return the tokens of each key along `dim`, some more than once; their gradients are summed in fp32.

    Of two copies, as a prompt of a pair has, any order gives the same sum; of more, the order on CUDA is that of atomic
    additions unless `torch.use_deterministic_algorithms` is on.
    """
    exact = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(exact).index_select(dim, index).to(tensor.dtype)


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

    Args:
        grad_out, out: (tokens, heads, head_dim), as `fold_sinks` returned it.
        lse: (heads, tokens), as `fold_sinks` returned it.
        sinks: (heads,).
    """
    if sinks is None:
        return grad_out.new_empty(0)
    delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(0, 1)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)


class RowBackend(Backend):
    """A backend whose flash kernel runs over a whole row, with windows and sinks.

    Attributes:
        library: the kernel's name in reports.
        generations: major compute capabilities that it supports; `needs` says so in messages.
    """

    flattens = shares = True
    library: str
    generations: range
    needs: str

    def refuses(self, features: ModelFeatures) -> str:
        return first_reason(self._lacks(features))

    def reason(self, features: ModelFeatures) -> str:
        capability = "".join(map(str, features.capability or ()))
        return f"{self.library}, {_short(features.compute_dtype)}, sm{capability}; {described(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> RowLayer:
        return RowLayer.of(self.name, batch, device)

    def _lacks(self, features: ModelFeatures) -> Iterator[object]:
        """Yield why the kernel cannot run a model."""
        name, dtype, capability = self.name, features.compute_dtype, features.capability
        device = ".".join(map(str, capability or ()))
        yield features.device_type != "cuda" and f"{name} needs CUDA, the model is on {features.device_type}"
        unsupported = capability is not None and capability[0] not in self.generations
        yield unsupported and f"{name} needs compute capability {self.needs}, this device has {device}"
        unsupported = dtype not in FLASH_DTYPES
        yield unsupported and f"{name} needs bf16 or fp16, this run computes in {_short(dtype)} (bf16=False?)"
        too_wide = features.head_dim > MAX_HEAD_DIM
        yield too_wide and f"head_dim {features.head_dim} is over {name}'s limit of {MAX_HEAD_DIM}"
        yield features.dropout and f"{name} does not support dropout (the model's is {features.dropout})"
        yield features.softcap and not KERNELS[name][1] and f"{name} has no softcap"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
