"""One attention call per document over host lengths: any device, any dtype, no total_tokens^2 anywhere.

On the CPU, torch's flash kernel runs per segment; its log-sum-exp makes attention sinks exact (`operators.py`). The
same operator in plain torch (`reference.py`) is the oracle and serves softcapping, which no kernel of torch has, and
sinks on other devices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.attention.operators import attention_operator, fold_sinks, pad_head, sink_gradient
from fastpack_trl.attention.reference import (
    NO_SOFTCAP,
    NO_WINDOW,
    DocumentInputs,
    additive,
    band_mask,
    corner,
    empty_output,
    reference_backward,
    reference_forward,
    segment_lengths,
)
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import NEEDS, found, lacks
from fastpack_trl.packing.packed_batch import PackedBatch

_flash_cpu, _flash_cpu_backward = (found(path) for path in NEEDS["per_document on the CPU"])
_HAS_FLASH_CPU = not lacks("per_document on the CPU")
FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)


class PerDocumentLayer(NamedTuple):
    """What crosses a layer boundary: tensors and ints."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 **on the host**, so that no layer asks the device for lengths."""
    max_seqlen: int
    bands: dict[int, Tensor]
    """Per window: (max_seqlen, max_seqlen) additive float mask of the band; (2, 2) where no segment exceeds it."""
    repeats: bool = False
    """Key heads are repeated for the queries of their group: no kernel of the device takes fewer of them."""

    @property
    def calls_per_document(self) -> bool:
        """Return True: off the CPU, the calls are no part of a graph."""
        return True

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend segment by segment.

        Raises:
            ValueError: dropout is asked for.
        """
        query, key, value, scale, window, sinks, softcap, dropout, _ = call
        if dropout:
            raise ValueError(f"attention dropout is {dropout}: per_document has none; use packed_attention='sdpa'")
        window = window or NO_WINDOW
        band = self.bands.get(window)
        plain = sinks is None and softcap is None
        # One document needs no splitting, and torch's autograd costs less than a function in Python. A graph would be
        # made again for such a row.
        alone = not torch.compiler.is_compiling() and self.cu_seqlens.shape[0] == 2
        if plain and (alone or query.device.type != "cpu"):
            # The kernels that take a mask take no groups of heads.
            repeats = self.repeats or (query.is_cuda and band is not None)
            return _native_sdpa(query, key, value, self.cu_seqlens, band, window, scale, repeats)
        out: Tensor = _attention(
            query, key, value, self.cu_seqlens, sinks, band, window, scale, softcap or NO_SOFTCAP, self.max_seqlen
        )[0]
        return out


class PerDocument(Backend):
    """The backend ``per_document``: every device, dtype, window, sink and softcap; no dropout."""

    name = "per_document"
    flattens = True

    def refuses(self, features: ModelFeatures) -> str:
        return f"attention dropout is {features.dropout}: no kernel per document has any" if features.dropout else ""

    def reason(self, features: ModelFeatures) -> str:
        missing = lacks("per_document on the CPU") if features.device_type == "cpu" else ""
        parts = [features.device_type, described(features), missing and f"plain torch: {missing}"]
        return "; ".join(filter(None, parts))

    def refuses_compile(self, features: ModelFeatures) -> str:
        # Windows, sinks or softcaps would be plain torch per document: right, and nothing to gain from.
        device = features.device_type
        calls = f"per_document on {device} calls a kernel per document, which is no part of a graph"
        return calls if device != "cpu" else ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PerDocumentLayer:
        ends = torch.tensor((0, *batch.segment_lengths)).cumsum(0, dtype=torch.int32)
        bands = {window: _band(batch.max_seqlen, window, device) for window in features.windows}
        return PerDocumentLayer(ends, batch.bucketed_max_seqlen, bands, repeats=not has_grouped_kernel(features))


def has_grouped_kernel(features: ModelFeatures) -> bool:
    """Return whether `scaled_dot_product_attention` has a fused kernel with fewer key heads: on CUDA, flash alone."""
    if features.device_type != "cuda":
        return True
    capable = features.capability is None or features.capability >= FLASH_CAPABILITY
    return capable and features.compute_dtype in FLASH_DTYPES


def _band(longest: int, window: int, device: torch.device) -> Tensor:
    # Additive, as the flash kernel of the CPU wants it; fp32 goes with every input dtype. Where no segment exceeds the
    # window nobody reads it, but a compiled layer must not be made again because it is missing.
    if longest <= window:
        return torch.zeros(2, 2, device=device)
    return additive(band_mask(longest, window, device))


def _native_sdpa(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, band: Tensor | None, window: int, scale: float,
    repeats: bool,
) -> Tensor:  # fmt: skip
    """Call `scaled_dot_product_attention` per segment, with torch's own autograd: for devices with a fused kernel."""
    outs = []
    if repeats and query.shape[1] != key.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    bounds = cu_seqlens.tolist()  # a host tensor: no device is asked
    for start, end in pairwise(bounds):
        mask = corner(band, end - start, window)
        mask = None if mask is None else mask.to(query.dtype)
        # A slice of all of a tensor would have its gradient copied.
        q, k, v = (t if len(bounds) == 2 else t[:, :, start:end] for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)).transpose(1, 2).contiguous()


def per_document_attention(*fields: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp, as `reference_forward`, of the fields of `DocumentInputs`."""
    inputs = DocumentInputs(*fields)
    if _takes_flash(inputs):
        return _flash_forward(inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):  # the reference chooses its own dtype: fp32
        return reference_forward(inputs)


def per_document_attention_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (an empty tensor if there are none)."""
    inputs = DocumentInputs(*fields)
    backward = _flash_backward if _takes_flash(inputs) else reference_backward
    return (*backward(inputs, grad_out, out, lse), sink_gradient(grad_out, out, lse, inputs.sinks))


def _takes_flash(inputs: DocumentInputs) -> bool:
    return inputs.query.device.type == "cpu" and inputs.softcap == NO_SOFTCAP and _HAS_FLASH_CPU


def _flash_forward(inputs: DocumentInputs) -> tuple[Tensor, Tensor]:
    query, key, value = inputs[:3]
    out, lse = empty_output(query, value)
    band = _in_kernel_dtype(inputs.band, query)
    lengths, value_dim = segment_lengths(inputs.cu_seqlens), value.shape[-1]
    width = max(query.shape[-1], value_dim)
    tokens = (pad_head(tensor, width).split(lengths, dim=2) for tensor in (query, key, value))
    results = zip(out.transpose(1, 2).split(lengths, dim=2), lse.split(lengths, dim=2), strict=True)
    for length, q, k, v, (part, part_lse) in zip(lengths, *tokens, results, strict=True):
        mask = corner(band, length, inputs.window)
        segment, segment_lse = _flash_cpu(q, k, v, 0.0, mask is None, attn_mask=mask, scale=inputs.scale)
        part.copy_(segment if segment.shape == part.shape else segment[..., :value_dim])
        part_lse.copy_(segment_lse)
    return fold_sinks(out, lse, inputs.sinks)


def _flash_backward(
    inputs: DocumentInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs[:3]
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    band = _in_kernel_dtype(inputs.band, query)
    lengths = segment_lengths(inputs.cu_seqlens)
    width = max(query.shape[-1], value.shape[-1])
    heads_first = (grad_out.transpose(1, 2), query, key, value, out.transpose(1, 2))
    # The kernel reads the log-sum-exp as (tokens, heads) in memory, which is how `empty_output` lays it out.
    tokens = (*(pad_head(tensor, width) for tensor in heads_first), lse)
    parts = zip(*(grad.split(lengths, dim=2) for grad in grads), strict=True)
    for length, *segment, results in zip(lengths, *(t.split(lengths, dim=2) for t in tokens), parts, strict=True):
        mask = corner(band, length, inputs.window)
        found_grads = _flash_cpu_backward(*segment, 0.0, mask is None, attn_mask=mask, scale=inputs.scale)
        for part, grad in zip(results, found_grads, strict=True):
            part.copy_(grad if grad.shape == part.shape else grad[..., : part.shape[-1]])
    return grads


def _in_kernel_dtype(band: Tensor | None, query: Tensor) -> Tensor | None:
    # The kernel takes an fp32 mask beside fp32, bf16 and fp16, but reads an fp32 mask beside fp64 as fp64, unchecked.
    return band.double() if band is not None and query.dtype == torch.float64 else band


def _fake(*fields: Any) -> tuple[Tensor, Tensor]:
    inputs = DocumentInputs(*fields)
    return empty_output(inputs.query, inputs.value)


def _pairs(inputs: DocumentInputs) -> int:
    """Return the query-key pairs per head, counted as torch counts its own: the full square of each segment."""
    lengths = inputs.cu_seqlens
    if type(lengths) is Tensor and lengths.device.type == "cpu":
        return int(lengths.diff().square().sum())
    return int(inputs.query.shape[2] * inputs.max_seqlen)  # while tracing there are no lengths: a bound, never free


def _flops(*fields: Any, **_keywords: Any) -> int:
    inputs = DocumentInputs(*fields)
    width = inputs.query.shape[-1] + inputs.value.shape[-1]
    return 2 * inputs.query.shape[1] * width * _pairs(inputs)


def _flops_backward(_grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any, **_keywords: Any) -> int:
    inputs = DocumentInputs(*fields)
    # Five products: the scores again, dP, dQ and dK at the query's width or the value's, dV.
    width = 3 * inputs.query.shape[-1] + 2 * inputs.value.shape[-1]
    return 2 * inputs.query.shape[1] * width * _pairs(inputs)


_attention = attention_operator(
    DocumentInputs, per_document_attention, per_document_attention_backward, fake=_fake, flops=_flops,
    flops_backward=_flops_backward, on_host=DocumentInputs._fields.index("cu_seqlens"),
)  # fmt: skip
