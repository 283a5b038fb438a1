"""flash-linear-attention's kernels for the gated delta rule, where they are installed and right on this device.

Given no metadata, each of its layers would ask the device for the lengths of the documents. All layers are given the
same two tensors here, made once per batch. Called inside of operators of ours, as a compiled layer needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.mixers import SCANS, Scan
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent.precision import no_autocast, rounds_anyway
from fastpack_trl.recurrent.rules import delta_flops, delta_gradient_flops, like_row, like_value, packed_delta

logger = logging.getLogger(__name__)

KEYWORD = "packed_fla"
"""Of the model's forward, with the `FlaRow` of its row."""
_KIND = SCANS["torch_chunk_gated_delta_rule"]
_FUNCTION = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
_DEVICES = ("cuda",)
_LENGTHS = (70, 1, 130)  # tokens of the documents of a trial: one, two and three chunks
_MOST_ERROR = 0.05
"""Relative, of a trial: all of its products are in 16 bits, which costs 1e-2; a wrong gradient is far beyond."""


class FlaRow(NamedTuple):
    """What the kernels read of a packed row, whose chunks begin with each document.

    ``seq_lengths=(70, 58)``: ``cu_seqlens=[0, 70, 128]``, ``chunk_indices=[[0, 0], [0, 1], [1, 0]]``.

    Attributes:
        cu_seqlens: (num_segments + 1,) int32; the batch's own.
        chunk_indices: (chunks, 2) int32, the document of each chunk and its number there.
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor


def fla_row(batch: PackedBatch) -> FlaRow:
    """Return what the kernels read of a batch, made at most once; no device is asked."""
    return batch.derive(("fla", batch.device), lambda: _build(batch))


def _build(batch: PackedBatch) -> FlaRow:
    ends = batch.cu_seqlens
    counts = (ends.diff() + (CHUNK - 1)) // CHUNK
    total = sum(-(-length // CHUNK) for length in batch.segment_lengths)
    documents = torch.arange(len(counts), device=ends.device, dtype=ends.dtype)
    of_chunk = documents.repeat_interleave(counts, output_size=total)
    begun = counts.cumsum(0, dtype=ends.dtype) - counts
    numbers = torch.arange(total, device=ends.device, dtype=ends.dtype) - begun[of_chunk]
    return FlaRow(ends, torch.stack([of_chunk, numbers], 1))


_ROW = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, bool normalise, " + arguments_of(FlaRow)
_function = cache(resolve)


def fla_delta_forward(*arguments: Any) -> Tensor:
    *row, normalise, cu_seqlens, chunk_indices = arguments
    query, key, value, g, beta = (tensor[None] for tensor in row)
    with no_autocast(query):
        out: Tensor = _function(_FUNCTION)(
            query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=normalise, cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices,
        )[0]  # fmt: skip
    return out[0]


def fla_delta_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        row = [tensor.detach().requires_grad_() for tensor in arguments[:5]]
        out = fla_delta_forward(*row, *arguments[5:])
    return tuple(gradient.contiguous() for gradient in torch.autograd.grad(out, row, grad))


_forward = operator(fla_delta_forward, fake=like_value, flops=delta_flops, signature=f"({_ROW}) -> Tensor")
_backward = operator(
    fla_delta_backward, fake=like_row, flops=delta_gradient_flops,
    signature=f"(Tensor grad, {_ROW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


class _FlaDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:5], *arguments[6:])
        ctx.normalise = arguments[5]
        out: Tensor = _forward(*arguments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *_backward(grad, *saved[:5], ctx.normalise, *saved[5:]), None, None, None


_fla_delta = differentiable("fla_delta", f"({_ROW}) -> Tensor", _FlaDelta)


def fla_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, row: FlaRow, *, normalise: bool = False
) -> Tensor:
    """Return what `packed_delta` returns, by fla's kernels."""
    out: Tensor = _fla_delta(query, key, value, g, beta, normalise, *row)
    return out


def is_chosen(features: ModelFeatures) -> bool:
    """Return whether fla's kernels run the gated delta rule of a model."""
    return _KIND in features.mixers and find_spec("fla") is not None and not refusal(features)


def described(kind: str, features: ModelFeatures) -> str:
    """Return how recurrent layers of a kind run, and why fla does not run them although it is installed."""
    if kind != _KIND or find_spec("fla") is None:
        return f"{kind} over chunks"
    return f"{kind} over chunks ({why})" if (why := refusal(features)) else f"{kind} by fla"


@lru_cache(maxsize=256)
def refusal(features: ModelFeatures) -> str:
    """Return why the kernels do not run the gated delta rule of a model, or ``""``; tried once, logged where wrong."""
    return first_reason(_lacks(features))


def _lacks(features: ModelFeatures) -> Iterator[object]:
    yield features.device_type not in _DEVICES and f"fla needs CUDA, the model is on {features.device_type}"
    name = str(features.compute_dtype).removeprefix("torch.")
    yield not rounds_anyway(features.compute_dtype) and f"fla computes in 16 bits, this run in {name}"
    triton = Version(version("triton") if find_spec("triton") else "0")
    if (features.capability or (0,))[0] == 9 and Version("3.4.0") <= triton < Version("3.7.1"):
        # fla raises there: its gradients of `g` and `beta` came out wrong.
        yield find_spec("tilelang") is None and (
            f"fla refuses its backward on Hopper with Triton {triton} (fla issue 640): Triton 3.7.1 or tilelang"
        )
    scans = [scan for scan in features.scans if scan.kind == _KIND]
    yield not scans and "the sizes of its layers are not known"
    yield from (_failure(scan, features.compute_dtype, features.device_type) for scan in scans)


def _failure(scan: Scan, dtype: torch.dtype, device: str) -> str:
    try:
        wrong = _try(scan, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a package or its compiler raises
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        return ""
    logger.warning(f"packed_attention: fla failed its trial on this {device} ({wrong}); plain torch runs in its place")
    return f"fla failed its trial: {wrong}"


def _try(scan: Scan, dtype: torch.dtype, device: str) -> str:
    """Run three documents, forward and backward."""
    if _function(_FUNCTION) is None:
        return f"there is no {_FUNCTION}"
    batch, tokens = PackedBatch.from_lengths(_LENGTHS).to(device), sum(_LENGTHS)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator).to(device, dtype)

    keys = (scan.key_heads, scan.size)
    row = [draw(*keys), draw(*keys), draw(scan.heads, scan.width), -draw(scan.heads).float().abs()]
    row.append(draw(scan.heads).sigmoid())
    upstream = draw(scan.heads, scan.width)
    with torch.enable_grad():
        given = [tensor.requires_grad_() for tensor in row]
        exact = [tensor.detach().float().requires_grad_() for tensor in row]
        query, key, value, g, beta = exact
        out = _fla_delta(*given, True, *fla_row(batch))
        oracle = packed_delta(query, key, value, g, beta, chunks_of(batch), normalise=True)
        actual = (out.detach(), *torch.autograd.grad(out, given, upstream))
        expected = (oracle.detach(), *torch.autograd.grad(oracle, exact, upstream.float()))
    names = ("output", *(f"gradient of {name}" for name in ("query", "key", "value", "g", "beta")))
    for name, own, right in zip(names, actual, expected, strict=True):
        error = float((own.float() - right).norm() / right.norm())
        if not error <= _MOST_ERROR:  # NaN too
            return f"its {name} is {error:.1%} off that of plain torch"
    return ""
