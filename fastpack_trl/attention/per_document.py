"""One attention call per document over host lengths: any device, any dtype, no total_tokens^2 anywhere.

On the CPU, torch's flash kernel runs per segment; its log-sum-exp makes attention sinks exact (`operators.py`). The
same operator in plain torch (`reference.py`) is the oracle and serves softcapping, which no kernel of torch has, and
sinks on other devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.attention.operators import attention_operator, fold_sinks, gather_keys, pad_head, sink_gradient
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
    window_band,
)
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import NEEDS, missing_reason, resolve
from fastpack_trl.packing.packed_batch import PackedBatch

_flash_cpu, _flash_cpu_backward = (resolve(path) for path in NEEDS["per_document on the CPU"])
_HAS_FLASH_CPU = not missing_reason("per_document on the CPU")
FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)


class PerDocumentLayer(NamedTuple):
    """What crosses a layer boundary: tensors and ints."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 **on the host**, so that no layer asks the device for lengths."""
    max_seqlen: int
    bands: dict[int, Tensor]
    """Per window: (most keys, most keys) additive float mask of the band; (2, 2) where no segment exceeds it. Without a
    window (0): where keys are shared and the device's kernels take no other causality than top-left."""
    repeats: bool = False
    """Key heads are repeated for the queries of their group: no kernel of the device takes fewer of them."""
    cu_seqlens_k: Tensor | None = None
    """(num_segments + 1,) int32 **on the host**, of keys that are shared (`SharedKeys`)."""
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device."""

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
        if self.key_index is not None:
            key, value = (
                gather_keys(tensor[0].transpose(0, 1), self.key_index).transpose(0, 1)[None] for tensor in (key, value)
            )
        plain = sinks is None and softcap is None
        # One document needs no splitting, and torch's autograd costs less than a function in Python. A graph would be
        # made again for such a row.
        alone = not torch.compiler.is_compiling() and self.cu_seqlens.shape[0] == 2
        inputs = DocumentInputs(
            query, key, value, self.cu_seqlens, sinks, band, window, scale, softcap or NO_SOFTCAP, self.max_seqlen,
            self.cu_seqlens_k,
        )  # fmt: skip
        if plain and (alone or query.device.type != "cpu"):
            # The kernels that take a mask take no groups of heads.
            repeats = self.repeats or (query.is_cuda and (band is not None or self.key_index is not None))
            return _native_sdpa(inputs, self.bands.get(NO_WINDOW), repeats)
        out: Tensor = _attention(*inputs)[0]
        return out


class PerDocument(Backend):
    """The backend ``per_document``: every device, dtype, window, sink and softcap; no dropout."""

    name = "per_document"
    flattens = True

    def refuses(self, features: ModelFeatures) -> str:
        return f"attention dropout is {features.dropout}: no kernel per document has any" if features.dropout else ""

    def reason(self, features: ModelFeatures) -> str:
        missing = missing_reason("per_document on the CPU") if features.device_type == "cpu" else ""
        parts = [features.device_type, described(features), missing and f"plain torch: {missing}"]
        return "; ".join(filter(None, parts))

    def refuses_compile(self, features: ModelFeatures) -> str:
        # Windows, sinks or softcaps would be plain torch per document: right, and nothing to gain from.
        device = features.device_type
        calls = f"per_document on {device} calls a kernel per document, which is no part of a graph"
        return calls if device != "cpu" else ""

    def refuses_shared(self, features: ModelFeatures) -> str:
        return ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PerDocumentLayer:
        ends, shared = torch.tensor((0, *batch.segment_lengths)).cumsum(0, dtype=torch.int32), batch.shared
        longest = batch.max_seqlen if shared is None else max(batch.max_seqlen, shared.max_seqlen_k)
        bands = {window: _band(longest, window, device) for window in features.windows}
        layer = PerDocumentLayer(ends, batch.bucketed_max_seqlen, bands, repeats=not has_grouped_kernel(features))
        if shared is None:
            return layer
        if device.type != "cpu":
            bands[NO_WINDOW] = additive(band_mask(longest, longest, device))
        keys = [length + prefix for length, prefix in zip(batch.segment_lengths, shared.prefix_lengths, strict=True)]
        ends_k = torch.tensor((0, *keys)).cumsum(0, dtype=torch.int32)
        return layer._replace(cu_seqlens_k=ends_k, key_index=shared.key_index.to(device))


def has_grouped_kernel(features: ModelFeatures) -> bool:
    """Return whether `scaled_dot_product_attention` has a fused kernel with fewer key heads: on CUDA, flash alone."""
    if features.device_type != "cuda":
        return True
    capable = features.capability is None or features.capability >= FLASH_CAPABILITY
    return capable and features.compute_dtype in FLASH_DTYPES


def _band(longest: int, window: int, device: torch.device) -> Tensor:
    # Additive, as the flash kernel of the CPU wants it; fp32 goes with every input dtype. Where no segment exceeds the
    # window nobody reads it, but a compiled layer must not be made again because it is missing.
    band = window_band(longest, window, device)
    return torch.zeros(2, 2, device=device) if band is None else band


def _native_sdpa(inputs: DocumentInputs, causal: Tensor | None, repeats: bool) -> Tensor:
    """Call `scaled_dot_product_attention` per segment, with torch's own autograd: for devices with a fused kernel.

    Its own causality is aligned top-left: queries behind a prefix need the `causal` mask, of the form of a band.
    """
    outs = []
    query, key, value = inputs[:3]
    if repeats and query.shape[1] != key.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    segments = inputs.segments
    for part, seen in segments:
        length = part.stop - part.start
        prefix = seen.stop - seen.start - length
        mask = corner(inputs.band, length, inputs.window, prefix)
        mask = corner(causal, length, NO_WINDOW, prefix) if mask is None and prefix else mask
        mask = None if mask is None else mask.to(query.dtype)
        # A slice of all of a tensor would have its gradient copied.
        q, k, v = (
            tensor if len(segments) == 1 else tensor[:, :, place]
            for tensor, place in ((query, part), (key, seen), (value, seen))
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=inputs.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
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
    value_dim, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (pad_head(tensor, width) for tensor in (query, key, value))
    heads_first = out.transpose(1, 2)
    for part, seen in inputs.segments:
        q, k, v = query[:, :, part], key[:, :, seen], value[:, :, seen]
        calls = _calls(inputs, q, k, band)
        found = [_flash_cpu(q, k[:, :, at], v[:, :, at], 0.0, **how, scale=inputs.scale) for at, how in calls]
        segment, segment_lse = found[0] if len(found) == 1 else _merged(found)
        heads_first[:, :, part].copy_(segment[..., :value_dim])
        lse[:, :, part].copy_(segment_lse)
    return fold_sinks(out, lse, inputs.sinks)


def _calls(inputs: DocumentInputs, query: Tensor, key: Tensor, band: Tensor | None) -> list[tuple[slice, Any]]:
    """Return the keys of each call of the kernel for one segment, and its causality.

    Behind a prefix these are two: the kernel's causality is aligned top-left. Each of the two backward calls is given
    the output and the log-sum-exp of both, as with sinks (`operators.py`), and returns its share of the gradients.
    """
    prefix = key.shape[2] - query.shape[2]
    mask = corner(band, query.shape[2], inputs.window, prefix)
    if mask is not None or not prefix:
        return [(slice(None), {"is_causal": mask is None, "attn_mask": mask})]
    before: dict[str, Any] = {"is_causal": False, "attn_mask": None}
    return [(slice(0, prefix), before), (slice(prefix, None), {"is_causal": True, "attn_mask": None})]


def _merged(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the same queries over the keys of two calls together."""
    total = torch.logaddexp(found[0][1], found[1][1])
    first, second = (out * torch.exp(lse - total)[..., None] for out, lse in found)
    return first + second, total


def _flash_backward(
    inputs: DocumentInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs[:3]
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    band = _in_kernel_dtype(inputs.band, query)
    width = max(query.shape[-1], value.shape[-1])
    # The kernel reads the log-sum-exp as (tokens, heads) in memory, which is how `empty_output` lays it out.
    of_queries = [pad_head(tensor, width) for tensor in (grad_out.transpose(1, 2), query, out.transpose(1, 2))]
    of_keys = [pad_head(tensor, width) for tensor in (key, value)]
    for part, seen in inputs.segments:
        up, q, made = (tensor[:, :, part] for tensor in of_queries)
        k, v = (tensor[:, :, seen] for tensor in of_keys)
        dq, dk, dv = (grad[:, :, place] for grad, place in zip(grads, (part, seen, seen), strict=True))
        queries: list[Tensor] = []
        for at, how in _calls(inputs, q, k, band):
            found_grads = _flash_cpu_backward(
                up, q, k[:, :, at], v[:, :, at], made, lse[:, :, part], 0.0, **how, scale=inputs.scale
            )
            queries.append(found_grads[0])
            for target, grad in zip((dk[:, :, at], dv[:, :, at]), found_grads[1:], strict=True):
                target.copy_(grad[..., : target.shape[-1]])
        dq.copy_((queries[0] if len(queries) == 1 else queries[0] + queries[1])[..., : dq.shape[-1]])
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
        keys = lengths if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k
        return int((lengths.diff() * keys.diff()).sum())
    # While tracing there are no lengths: a bound, never free.
    return int(inputs.query.shape[2] * (inputs.max_seqlen + inputs.key.shape[2] - inputs.query.shape[2]))


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
    flops_backward=_flops_backward, on_host=("cu_seqlens", "cu_seqlens_k"),
)  # fmt: skip
