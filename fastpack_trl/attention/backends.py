"""The list of backends, one line each, the choice between them, and the trial before one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fastpack_trl.attention import dense, flash_attention_4, per_document, varlen, xformers
from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.attention.reference import band_mask, document_attention
from fastpack_trl.kernels.trial import failed_trial, largest_error
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import Choice

_WINDOW = 5
_LENGTHS = (8, 4)  # tokens per document: one that exceeds the window, and a shorter one that must not see the first
_MOST_ERROR = 0.1
"""Relative error allowed in a 16-bit trial, where gradients of sinks nearly cancel; a wrong factor exceeds it."""

ORDINARY = ("eager", "sdpa")
"""Implementations of transformers that cannot separate packed documents: ours runs instead."""

AUTO: tuple[Backend, ...] = (
    flash_attention_4.FlashAttention4(), varlen.Varlen(), per_document.PerDocument(), dense.Dense(),
)  # fmt: skip
"""In the order of ``auto``, which takes the first correct one."""
BY_NAME: tuple[Backend, ...] = (xformers.Xformers(),)
"""Used only if the user names one."""

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*AUTO, *BY_NAME)}


def choose(
    requested: str, features: ModelFeatures, *, stock_requested: str | None = None,
    attempt: Callable[[Backend, ModelFeatures], str] | None = None,
) -> Choice:  # fmt: skip
    """Choose the path for a model.

    Args:
        requested: ``auto``, ``off`` or the name of a backend.
        stock_requested: an `attn_implementation` that the user set. One of `ORDINARY` says how batches
            that are not packed run; ``auto`` leaves packed rows to any other, which has a kernel for them.
        attempt: returns why a backend that should be right fails on this machine, or ``""`` (`failure`); None: untried.

    Raises:
        ValueError: the requested backend does not exist, or would be wrong for the model; names the remedy.
    """
    if requested == "off":
        return Choice("off", "switched off")
    by_name = requested != "auto"
    if by_name and requested not in BACKENDS:
        raise ValueError(f"packed_attention={requested!r} does not exist: use one of auto, {', '.join(BACKENDS)}, off")
    if not by_name and stock_requested is not None and stock_requested not in ORDINARY:
        return Choice("off", f"attn_implementation={stock_requested!r} was asked for")
    asked = [f"batches that are not packed run attn_implementation={stock_requested!r}"] if stock_requested else []
    refusals: list[str] = []
    for backend in [BACKENDS[requested]] if by_name else [one for one in AUTO if one.considered(features)]:
        refusal = features.gap or backend.refuses(features) or (attempt(backend, features) if attempt else "")
        if not refusal:
            reason = backend.reason(features)
            others = (one for one in refusals if not one.endswith("needs CUDA, the model is on cpu"))  # as expected
            reasons = ["asked for", reason] if by_name else [reason, *asked, *others]
            return Choice(backend.name, "; ".join(reasons), backend.flattens)
        refusals.append(refusal)
    if by_name:
        raise ValueError(
            f"packed_attention={requested!r} cannot be used here: {refusals[0]}; use packed_attention='auto'"
        )
    return Choice(PADDED_DOCUMENTS, "; ".join([refusals[-1], *asked]))


def failure(backend: Backend, features: ModelFeatures) -> str:
    """Return why `backend` fails, or gives wrong results, on this machine for such a model, or ``""``; logged once."""
    if not backend.tried or features.device_type == "meta":
        return ""
    # Families with the same attention share one trial.
    windows = frozenset({_WINDOW} if features.windows else ())
    return _failure(backend, replace(features, model_type="", implementation="", windows=windows))


@lru_cache(maxsize=256)
def _failure(backend: Backend, features: ModelFeatures) -> str:
    return failed_trial(backend.name, features.device_type, _MOST_ERROR, lambda: _error_of(backend, features))


def _error_of(backend: Backend, features: ModelFeatures) -> float:
    """Return the `largest_error` of two documents."""
    device, dtype = torch.device(features.device_type), features.compute_dtype
    window, scale = min(features.windows, default=None), features.head_dim**-0.5
    softcap = 30.0 if features.softcap else None
    heads, kv_heads = features.num_heads, features.kv_heads or features.num_heads
    shapes = [(1, count, sum(_LENGTHS), features.head_dim) for count in (heads, kv_heads, kv_heads)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs += [torch.randn(heads, generator=generator)] if features.sinks else []
    layer = backend.prepare(PackedBatch.from_lengths(_LENGTHS).to(device), features, device)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return layer.attend(AttentionCall(query, key, value, scale, window, sinks, softcap))

    def plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        outs = []
        for q, k, v in zip(*(tensor.split(_LENGTHS, dim=2) for tensor in (query, key, value)), strict=True):
            mask = band_mask(q.shape[2], window or q.shape[2], device)
            outs.append(document_attention(q, k, v, mask, scale, sinks, softcap)[0].transpose(1, 2))
        return torch.cat(outs, dim=1)

    with torch.autocast(device.type, enabled=False):
        return largest_error(attend, plain, [tensor.to(device, dtype) for tensor in inputs])
