"""flash-linear-attention's kernels for the gated delta rule, if they are installed and correct on this device.

Without metadata each of its layers would synchronize for the lengths of the documents. Here all layers read the same
two tensors, made once per batch.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastpack_trl.kernels.operators import arguments_of
from fastpack_trl.kernels.trial import failed_trial, largest_error
from fastpack_trl.model.facts import SCANS, ModelFeatures, Scan
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent.delta import ROW, delta_flops, like_value, packed_delta
from fastpack_trl.recurrent.recomputed import recomputed

KEYWORD = "packed_fla"
"""Keyword of the model's forward for the `FlaRow` of its row."""
_KIND = SCANS["torch_chunk_gated_delta_rule"]
_FUNCTION = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
_DEVICES = ("cuda",)
_LENGTHS = (70, 1, 130)  # tokens of the documents of a trial: one, two and three chunks
_MAX_ERROR = 0.05
"""Relative error allowed in a trial: 16-bit matmuls cost 1e-2; wrong gradients have far larger errors."""
_function = cache(resolve)


class FlaRow(NamedTuple):
    """The metadata of a packed row for the kernels, whose chunks begin with each document.

    ``seq_lengths=(70, 58)``: ``cu_seqlens=[0, 70, 128]``, ``chunk_indices=[[0, 0], [0, 1], [1, 0]]``.
    """

    cu_seqlens: Tensor
    """(num_segments + 1,) int32; the batch's own."""
    chunk_indices: Tensor
    """(chunks, 2) int32, the document of each chunk and its number there."""


def fla_row(batch: PackedBatch) -> FlaRow:
    """Return the metadata of a batch, made at most once and without synchronizing."""
    return batch.derive(("fla", batch.device), lambda: _build(batch))


def _build(batch: PackedBatch) -> FlaRow:
    ends = batch.cu_seqlens
    counts = (ends.diff() + (CHUNK - 1)) // CHUNK
    total = sum(-(-length // CHUNK) for length in batch.segment_lengths)
    documents, chunks = (torch.arange(n, device=ends.device, dtype=ends.dtype) for n in (len(counts), total))
    of_chunk = documents.repeat_interleave(counts, output_size=total)
    begun = counts.cumsum(0, dtype=ends.dtype) - counts
    return FlaRow(ends, torch.stack([of_chunk, chunks - begun[of_chunk]], 1))


def fla_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalise: bool, *fields: Tensor
) -> Tensor:
    """Compute `fla_delta` from the fields of `FlaRow`."""
    row = (part[None] for part in (query, key, value, g, beta))
    metadata = dict(zip(FlaRow._fields, fields, strict=True))
    return cast("Tensor", _function(_FUNCTION)(*row, use_qk_l2norm_in_kernel=normalise, **metadata)[0][0])


_fla_delta = recomputed(fla_delta_rule, ROW + arguments_of(FlaRow), inputs=5, fake=like_value, flops=delta_flops)


def fla_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, row: FlaRow, *, normalise: bool = False
) -> Tensor:
    """Compute `packed_delta` by fla's kernels."""
    return _fla_delta(query, key, value, g, beta, normalise, *row)


def is_chosen(features: ModelFeatures) -> bool:
    """Return whether fla's kernels run the gated delta rule of a model."""
    return _KIND in features.mixers and find_spec("fla") is not None and not refusal(features)


def described(kind: str, features: ModelFeatures) -> str:
    """Return how recurrent layers of a kind run, and why an installed fla is not used."""
    if kind != _KIND or find_spec("fla") is None:
        return f"{kind} over chunks"
    return f"{kind} over chunks ({why})" if (why := refusal(features)) else f"{kind} by fla"


@lru_cache(maxsize=256)
def refusal(features: ModelFeatures) -> str:
    """Return why the kernels do not run the gated delta rule of a model, or ``""``; a failed trial is logged once."""
    if features.device_type not in _DEVICES:
        return f"fla needs CUDA, the model is on {features.device_type}"
    if features.compute_dtype.itemsize != 2:
        return f"fla computes in 16 bits, this run in {str(features.compute_dtype).removeprefix('torch.')}"
    scans = [scan for scan in features.scans if scan.kind == _KIND]
    dtype, device = features.compute_dtype, features.device_type
    failures = (failed_trial("fla", device, _MAX_ERROR, partial(_error_of, scan, dtype, device)) for scan in scans)
    return next(filter(None, failures), "") if scans else "the sizes of its layers are not known"


def _error_of(scan: Scan, dtype: torch.dtype, device: str) -> float:
    """Return the `largest_error` of three documents."""
    if _function(_FUNCTION) is None:
        raise ImportError(f"there is no {_FUNCTION}")
    batch, generator = PackedBatch.from_lengths(_LENGTHS).to(device), torch.Generator().manual_seed(0)
    keys, values, scalars = (scan.key_heads, scan.size), (scan.heads, scan.width), (scan.heads,)
    query, key, value, g, beta = (
        torch.randn(sum(_LENGTHS), *shape, generator=generator).to(device, dtype)
        for shape in (keys, keys, values, scalars, scalars)
    )
    ours, by_torch = partial(fla_delta, row=fla_row(batch)), partial(packed_delta, chunks=chunks_of(batch))
    row = (query, key, value, -g.float().abs(), beta.sigmoid())
    return largest_error(partial(ours, normalise=True), partial(by_torch, normalise=True), row)
