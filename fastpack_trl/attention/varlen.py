"""torch's own variable-length flash kernel over a whole packed row: CUDA, bf16 and fp16, nothing to install.

`torch.nn.attention.varlen` wraps the same two operators; they are called directly, because its wrapper takes grouped
heads only from torch 2.12 on and passes no gradient through a corrected log-sum-exp (`operators.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention import cudnn
from fastpack_trl.attention.interface import AttentionCall, Backend, PackedLayer
from fastpack_trl.attention.operators import fold_sinks, gather_keys, sink_gradient, tokens_of
from fastpack_trl.attention.per_document import FLASH_CAPABILITY, FLASH_DTYPES, PerDocument
from fastpack_trl.attention.reference import NO_WINDOW
from fastpack_trl.attention.whole_row import MAX_HEAD_DIM, RowInputs, check_call, reason_for, row_operator
from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length
from fastpack_trl.packing.shared_keys import SharedKeys

# The varlen backward of FlashAttention-2 indexes a buffer of (total_q + 128 * num_seqs) * heads * round32(head_dim)
# elements with an int32.
_INT32 = 2**31
_BUFFER_ROWS_PER_SEGMENT = 128


LONG_DOCUMENTS: dict[tuple[int, ...], int] = {(9, 0): 4096}
"""Per compute capability: mean tokens per document from which one call per document beats one over the row.

On Hopper torch's varlen is FlashAttention-2, and `scaled_dot_product_attention` of a whole document has a faster
kernel: forward and backward of one document of 8,192 tokens take 3.8 ms against 6.9 (32/8 heads of 128), of 32,768
tokens 54 against 95; at a mean of 1,500 tokens varlen is ahead (2.1 against 2.5 ms at 8,192 tokens, 7.6 against 16 at
32,768). Measured on an H200.
"""


class RowPart(NamedTuple):
    """What one call of the operator reads: tensors and ints that are the same in most rows."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device, starting at 0."""
    max_seqlen: int
    start: int
    """First of its tokens in the row."""
    end: int
    bounds: Tensor | None = None
    """See `RowInputs`."""
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device, tokens of the row that are its keys (`SharedKeys`); None: its own tokens."""
    cu_seqlens_k: Tensor | None = None
    """(num_segments + 1,) int32 on the device, of these keys."""
    max_seqlen_k: int = 0


class VarlenLayer(NamedTuple):
    """One part, or several of a row that int32 cannot index: what crosses a layer boundary."""

    parts: tuple[RowPart, ...]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend over the whole row, or over each of its parts.

        Raises:
            ValueError: a dtype, dropout or softcap that the kernel does not have; names the remedy.
        """
        check_call("varlen", call, softcap=False)
        tokens, sinks, window, scale = tokens_of(call), call.sinks, call.window or NO_WINDOW, call.scale
        outs = []
        for cu_seqlens, max_seqlen, start, end, bounds, key_index, cu_seqlens_k, max_seqlen_k in self.parts:
            q, k, v = tokens if len(self.parts) == 1 else (tensor[start:end] for tensor in tokens)
            if key_index is not None:
                k, v = (gather_keys(tensor, key_index) for tensor in tokens[1:])
            row = RowInputs(q, k, v, cu_seqlens, sinks, bounds, window, scale, max_seqlen, cu_seqlens_k, max_seqlen_k)
            outs.append(_attention(*row)[0])
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out[None, ..., : call.value.shape[-1]].contiguous()


class Varlen(Backend):
    """The backend ``varlen``: CUDA from compute capability 8.0 on, bf16 or fp16, windows and sinks."""

    name = "varlen"
    flattens = True

    def refuses(self, features: ModelFeatures) -> str:
        if missing := missing_reason("varlen"):
            return missing
        reason = first_reason(self._lacks(features))
        return reason and f"varlen {reason}"

    def _lacks(self, features: ModelFeatures) -> Iterator[object]:
        needed, capability = _dotted(FLASH_CAPABILITY), features.capability
        dtype = str(features.compute_dtype).removeprefix("torch.")
        yield features.device_type != "cuda" and f"needs CUDA, the model is on {features.device_type}"
        low = capability is not None and capability < FLASH_CAPABILITY
        yield low and f"needs compute capability {needed}, this device has {_dotted(capability)}"
        yield (
            features.compute_dtype not in FLASH_DTYPES
            and f"needs bf16 or fp16, this run computes in {dtype} (bf16=False?)"
        )
        too_wide = features.head_dim > MAX_HEAD_DIM
        yield too_wide and f"head_dim {features.head_dim} is over its limit of {MAX_HEAD_DIM}"
        yield features.dropout and f"has no dropout, the model's is {features.dropout}"
        yield features.softcap and "has no softcap"

    def reason(self, features: ModelFeatures) -> str:
        return reason_for("torch's flash kernel", features)

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        if can_index(bucket.tokens, elements_per_token(features), bucket.segments):
            return ""
        return f"varlen's int32 backward cannot index {bucket.tokens} tokens in {bucket.segments} segments at once"

    def alone_from(self, features: ModelFeatures) -> float:
        has = features.head_dim <= cudnn.MAX_HEAD_DIM and not missing_reason("varlen per document")
        plain = not features.windows and not features.sinks
        return LONG_DOCUMENTS.get(features.capability or (), math.inf) if plain and has else math.inf

    def refuses_shared(self, features: ModelFeatures) -> str:
        return ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        """Cut the row where the kernel's backward could no longer index it; usually nowhere.

        Raises:
            ValueError: one document alone is too long for the kernel; names the remedy.
        """
        alone_from, elements = self.alone_from(features), elements_per_token(features)
        # A static row is not cut: where, would depend on its documents (`refuses_static`). With one segment, it is one
        # document in each batch; the lengths of more are read by the kernel over the row.
        if batch.is_static:
            known = (batch.total_tokens,) if len(batch.cu_seqlens) == 2 else ()
            part = _part(batch, known, 0, device, math.inf if batch.shared is not None else alone_from)
            return VarlenLayer((part if batch.shared is None else _with_keys(part, batch.shared, device),))
        lengths = batch.segment_lengths
        if alone_from < math.inf and not can_index(max(lengths), elements):
            return PerDocument().prepare(batch, features, device)
        runs, shared = indexable_runs(lengths, elements), batch.shared
        alone_from = math.inf if shared is not None else alone_from  # cuDNN is called for keys of their own
        parts, start, keys = [], 0, 0
        for first, end in runs:
            run = lengths[first:end]
            row = batch if len(runs) == 1 else PackedBatch.from_lengths(run)
            part = _part(row, run, start, device, alone_from)
            if shared is not None:
                part = _with_keys(part, shared, device)
            if shared is not None and len(runs) > 1:
                stop = keys + sum(run) + sum(shared.prefix_lengths[first:end])
                part, keys = _some_keys(part, slice(first, end + 1), slice(keys, stop)), stop
            parts.append(part)
            start = part.end
        return VarlenLayer(tuple(parts))


def elements_per_token(features: ModelFeatures) -> int:
    """Return the elements of the kernel's backward buffer per token: num_heads x round32(head_dim)."""
    return features.num_heads * (-(-features.head_dim // 32) * 32)


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def _part(row: PackedBatch, lengths: Sequence[int], start: int, device: torch.device, alone_from: float) -> RowPart:
    """Return a row, or a piece of one, with `RowInputs.bounds` of segments of these lengths."""
    bounds = None
    if alone_from < math.inf:
        apart = lengths and sum(lengths) >= alone_from * len(lengths) and min(lengths) >= cudnn.LEAST_TOKENS
        bounds = torch.tensor([0, *accumulate(lengths)] if apart else [0, 0], dtype=torch.int32)
    return RowPart(row.cu_seqlens.to(device), row.bucketed_max_seqlen, start, start + row.total_tokens, bounds)


def _with_keys(part: RowPart, shared: SharedKeys, device: torch.device) -> RowPart:
    """Return a part with the keys of its row."""
    index, ends = shared.key_index.to(device), shared.cu_seqlens_k.to(device)
    return part._replace(key_index=index, cu_seqlens_k=ends, max_seqlen_k=rounded_length(shared.max_seqlen_k))


def _some_keys(part: RowPart, ends: slice, keys: slice) -> RowPart:
    """Return a part with those keys that are its segments', which may be tokens of other parts."""
    assert part.key_index is not None
    assert part.cu_seqlens_k is not None
    return part._replace(key_index=part.key_index[keys], cu_seqlens_k=part.cu_seqlens_k[ends] - keys.start)


def can_index(tokens: int, elements_per_token: int, segments: int = 1) -> bool:
    """Return whether the kernel's backward can index so many tokens and segments, empty ones too, with an int32."""
    return (tokens + _BUFFER_ROWS_PER_SEGMENT * segments) * elements_per_token < _INT32


def indexable_runs(segment_lengths: tuple[int, ...], elements_per_token: int) -> list[tuple[int, int]]:
    """Return runs of segments, (first, end), that the kernel's backward can index with an int32 each.

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


def _in_kernel(row: RowInputs) -> dict[str, Any]:
    """Return scale and window as torch's operators take them: flash kernels do not count the token itself."""
    return {"scale": row.scale, "window_size_left": row.window - 1 if row.window else -1, "window_size_right": 0}


def varlen_attention(row: RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    documents = row.documents
    if documents and cudnn.serves(row.query, row.key, documents, row.scale):
        return cudnn.forward(row.query, row.key, row.value, documents, row.scale)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        row.query, row.key, row.value, *row.segments, 0.0, True, False, **_in_kernel(row)
    )
    return fold_sinks(out, lse, row.sinks)


def varlen_attention_backward(
    row: RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return its gradients."""
    documents = row.documents
    if documents and cudnn.serves(row.query, row.key, documents, row.scale):
        dq, dk, dv = cudnn.backward(grad_out, out, lse, row.query, row.key, row.value, documents, row.scale)
    else:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=row.query.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out, row.query, row.key, row.value, out, lse, *row.segments, 0.0, True, no_dropout,
            row.query.new_empty(0), **_in_kernel(row),
        )  # fmt: skip
    return dq, dk, dv, sink_gradient(grad_out, out, lse, row.sinks)


_attention = row_operator(varlen_attention, varlen_attention_backward)
