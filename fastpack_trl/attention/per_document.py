"""One attention call per document over host lengths: any device, any dtype, no total_tokens^2 anywhere.

On the CPU, torch's flash kernel runs per segment; its log-sum-exp makes attention sinks exact (`sinks.py`). The same
operator in plain torch (`reference_forward`, `reference_backward`) is the oracle and serves softcapping, which no
kernel of torch knows, and sinks on other devices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from fastpack_trl.attention.reference import (
    NO_SOFTCAP,
    NO_WINDOW,
    corner,
    empty_output,
    reference_backward,
    reference_forward,
    segment_lengths,
)
from fastpack_trl.attention.sinks import fold_sinks, pad_head, sink_gradient
from fastpack_trl.model.upstream import NEEDS, found, lacks
from fastpack_trl.packing.masks import shared_band_mask
from fastpack_trl.packing.packed_batch import PackedBatch

_flash_cpu, _flash_cpu_backward = (found(path) for path in NEEDS["per_document on the CPU"])
_HAS_FLASH_CPU = not lacks("per_document on the CPU")
_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)


class PerDocumentLayer(NamedTuple):
    """What crosses a layer boundary: tensors and one int, built once per batch by `prepare`."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 **on the host**, so that no layer asks the device for lengths."""
    max_seqlen: int
    bands: dict[int, Tensor]
    """Per window: (max_seqlen, max_seqlen) additive float mask of the band; (2, 2) where no segment exceeds it."""
    compiled: Any = None
    """The same row for a compiled layer, where one call per document cannot be part of a graph."""

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
        """Causal attention inside each segment.

        Args:
            query: (1, num_heads, total_tokens, head_dim).
            key, value: (1, num_kv_heads, total_tokens, head_dim); the value's head dim may differ (MLA).
            scale: factor of the scores.
            window: tokens each query sees, itself included; None for all before it.
            sinks: (num_heads,) one logit per head that takes part in the softmax and has no value.
            softcap: scores become ``softcap * tanh(scores / softcap)``.
            dropout: must be 0.
            module: the attention module; not needed here.

        Returns:
            (1, total_tokens, num_heads, value head_dim), contiguous.

        Raises:
            ValueError: dropout is asked for.
        """
        if dropout:
            raise ValueError(f"attention dropout is {dropout}: per_document has none; use packed_attention='sdpa'")
        window = window or NO_WINDOW
        band = self.bands.get(window)
        if query.device.type != "cpu" and sinks is None and softcap is None:
            return _native_sdpa(query, key, value, self.cu_seqlens, band, window, scale)
        arguments = (
            query, key, value, self.cu_seqlens, sinks, band, window, scale, softcap or NO_SOFTCAP, self.max_seqlen,
        )  # fmt: skip
        if _observed():
            return per_document_attention(*arguments)[0]
        out: Tensor = _Eager.apply(*arguments)
        return out


def prepare(batch: PackedBatch, windows: frozenset[int], device: torch.device) -> PerDocumentLayer:
    """Build the layers' view of `batch`; at most one band per window."""

    def build() -> PerDocumentLayer:
        bands = {}
        for window in windows:
            band = shared_band_mask(batch, window, device)
            # Additive, as the flash kernel of the CPU wants it; fp32 goes with every input dtype. Where no segment
            # exceeds the window nobody reads it, but a compiled layer must not be made again because it is missing.
            bands[window] = (
                torch.zeros(2, 2, device=device)
                if band is None
                else torch.zeros(band.shape, device=device).masked_fill_(~band, -torch.inf)
            )
        lengths = torch.tensor((0, *batch.segment_lengths), dtype=torch.int32)
        return PerDocumentLayer(lengths.cumsum(0, dtype=torch.int32), batch.bucketed_max_seqlen, bands)

    return batch.derive(("per_document", device), build)


def _native_sdpa(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, band: Tensor | None, window: int, scale: float
) -> Tensor:
    """`scaled_dot_product_attention` per segment with torch's own autograd, for devices with a fused kernel."""
    outs = []
    for start, end in pairwise(cu_seqlens.tolist()):  # a host tensor: no device is asked
        mask = corner(band, end - start, window)
        mask = None if mask is None else mask.to(query.dtype)
        out = F.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end],
            attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous()


def _observed() -> bool:
    """Whether something looks at operators: the compiler, a FLOP counter, selective checkpointing.

    Otherwise the same functions run without the operator around them, which costs 0.4 ms of host time per layer forward
    and backward: more than the whole attention of a row of 256 tokens gains.
    """
    return torch.compiler.is_compiling() or _dispatch_modes is None or _dispatch_modes() > 0


class _Eager(torch.autograd.Function):
    """`per_document_attention` for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, cu_seqlens, sinks, band, *scalars = inputs
        out, lse = _forward(query, key, value, cu_seqlens, sinks, band, *scalars[:-1])
        ctx.save_for_backward(query, key, value, out, lse, sinks, band)
        ctx.cu_seqlens, ctx.scalars = cu_seqlens, scalars
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks, band = ctx.saved_tensors
        dq, dk, dv, dsinks = _gradients(
            grad_out.contiguous(), query, key, value, out, lse, ctx.cu_seqlens, sinks, band, *ctx.scalars[:-1]
        )
        return dq, dk, dv, None, dsinks if sinks is not None else None, None, None, None, None, None


@torch.library.custom_op("fastpack::per_document_attention", mutates_args=())
def per_document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:
    """Shapes as in `PerDocumentLayer.attend`; also returns the log-sum-exp, (1, num_heads, total_tokens), fp32/fp64."""
    return _forward(query, key, value, cu_seqlens, sinks, band, window, scale, softcap)


@torch.library.custom_op("fastpack::per_document_attention_backward", mutates_args=())
def per_document_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (an empty tensor where there are none)."""
    return _gradients(grad_out, query, key, value, out, lse, cu_seqlens, sinks, band, window, scale, softcap)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu" and softcap == NO_SOFTCAP and _HAS_FLASH_CPU:
        return _flash_forward(query, key, value, cu_seqlens, sinks, band, window, scale)
    with torch.autocast(query.device.type, enabled=False):  # the reference chooses its own dtype: fp32
        return reference_forward(query, key, value, cu_seqlens, sinks, band, window, scale, softcap)


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if query.device.type == "cpu" and softcap == NO_SOFTCAP and _HAS_FLASH_CPU:
        grads = _flash_backward(grad_out, query, key, value, out, lse, cu_seqlens, band, window, scale)
    else:
        grads = reference_backward(grad_out, query, key, value, out, lse, cu_seqlens, band, window, scale, softcap)
    return (*grads, sink_gradient(grad_out, out, lse, sinks))


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    band: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = empty_output(query, value)
    band = _in_kernel_dtype(band, query)
    lengths, value_dim = segment_lengths(cu_seqlens), value.shape[-1]
    width = max(query.shape[-1], value_dim)
    tokens = (pad_head(tensor, width).split(lengths, dim=2) for tensor in (query, key, value))
    results = zip(out.transpose(1, 2).split(lengths, dim=2), lse.split(lengths, dim=2), strict=True)
    for length, q, k, v, (part, part_lse) in zip(lengths, *tokens, results, strict=True):
        mask = corner(band, length, window)
        segment, segment_lse = _flash_cpu(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        part.copy_(segment[..., :value_dim])
        part_lse.copy_(segment_lse)
    return fold_sinks(out, lse, sinks) if sinks is not None else (out, lse)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    band: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    band = _in_kernel_dtype(band, query)
    lengths = segment_lengths(cu_seqlens)
    width = max(query.shape[-1], value.shape[-1])
    heads_first = (grad_out.transpose(1, 2), query, key, value, out.transpose(1, 2))
    # The kernel reads the log-sum-exp as (tokens, heads) in memory, which is how `empty_output` lays it out.
    tokens = (*(pad_head(tensor, width) for tensor in heads_first), lse)
    parts = zip(*(grad.split(lengths, dim=2) for grad in grads), strict=True)
    for length, *inputs, results in zip(lengths, *(t.split(lengths, dim=2) for t in tokens), parts, strict=True):
        mask = corner(band, length, window)
        for part, segment in zip(
            results, _flash_cpu_backward(*inputs, 0.0, mask is None, attn_mask=mask, scale=scale), strict=True
        ):
            part.copy_(segment[..., : part.shape[-1]])
    return grads


def _in_kernel_dtype(band: Tensor | None, query: Tensor) -> Tensor | None:
    # The kernel takes an fp32 mask beside fp32, bf16 and fp16, but reads an fp32 mask beside fp64 as fp64, unchecked.
    return band.double() if band is not None and query.dtype == torch.float64 else band


@per_document_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, sinks: Any, band: Any, window: int, scale: float,
    softcap: float, max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_output(query, value)


@per_document_attention_backward.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    sinks: Tensor | None, band: Any, window: int, scale: float, softcap: float, max_seqlen: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sink_grad = torch.empty_like(sinks) if sinks is not None else grad_out.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), sink_grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, sinks, band, window, scale, softcap, max_seqlen = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, cu_seqlens, sinks, band)
    ctx.scalars = (window, scale, softcap, max_seqlen)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, cu_seqlens, sinks, band = ctx.saved_tensors
    dq, dk, dv, dsinks = per_document_attention_backward(
        grad_out.contiguous(), query, key, value, out, lse, cu_seqlens, sinks, band, *ctx.scalars
    )
    return dq, dk, dv, None, dsinks if sinks is not None else None, None, None, None, None, None


per_document_attention.register_autograd(_backward, setup_context=_setup_context)


def _pairs(cu_seqlens: Any, query: Any, max_seqlen: int) -> int:
    """Query-key pairs per head. Counted as torch counts its own attention: the full square of each segment."""
    if isinstance(cu_seqlens, Tensor) and type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu":
        return int(cu_seqlens.diff().square().sum())
    return int(query.shape[2] * max_seqlen)  # while tracing there are no lengths: an upper bound, never free


@register_flop_formula(torch.ops.fastpack.per_document_attention, get_raw=True)
def _flops(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> int:
    width = query.shape[-1] + value.shape[-1]
    return 2 * query.shape[1] * width * _pairs(cu_seqlens, query, args[-1])


@register_flop_formula(torch.ops.fastpack.per_document_attention_backward, get_raw=True)
def _flops_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    # Five products: the scores again, dP, dQ and dK at the query's width or the value's, dV.
    width = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * query.shape[1] * width * _pairs(args[2], query, args[-1])
