"""The list of backends, one line each, the choice between them, and the trial before one is chosen.

Backends call operators of torch and of others that move, and kernels that a build may lack. What fails in a trial, one
tiny forward and backward on the device, would fail in the first step, or train on wrong tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from fastpack_trl.attention import dense, flash_attention_4, per_document, varlen, xformers
from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.attention.reference import band_mask, document_attention
from fastpack_trl.config import refuse_removed
from fastpack_trl.model.facts import UNREADABLE, ModelFeatures
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import Choice

logger = logging.getLogger(__name__)

_WINDOW = 5
_LENGTHS = (8, 4)  # tokens per document: one past the window, and a shorter one, which shows what of the first it sees
_MOST_ERROR = 0.1
"""Relative error allowed in a 16-bit trial, where gradients of sinks nearly cancel; a wrong factor exceeds it."""

_OFF = "its results are {:.1%} off those of plain torch"

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
    requested: str,
    features: ModelFeatures,
    *,
    stock_requested: str | None = None,
    attempt: Callable[[Backend, ModelFeatures], str] | None = None,
    elements: float = math.inf,
) -> Choice:
    """Choose the path for a model.

    Args:
        requested: ``auto``, ``off`` or the name of a backend.
        stock_requested: an `attn_implementation` that the user set. One of `ORDINARY` says how batches
            that are not packed run; ``auto`` leaves packed rows to any other, which has a kernel for them.
        attempt: returns why a backend that should be right fails on this machine, or ``""`` (`failure`); None: untried.
        elements: of the queries of the whole run (`Backend.too_costly`).

    Raises:
        ValueError: the requested backend does not exist, or would be wrong for the model; names the remedy.
    """
    if requested == "off":
        return Choice("off", "switched off")
    by_name = requested != "auto"
    if by_name and requested not in BACKENDS:
        refuse_removed([f"packed_attention={requested!r}"])
        raise ValueError(f"packed_attention={requested!r} does not exist: use one of auto, {', '.join(BACKENDS)}, off")
    if not by_name and stock_requested is not None and stock_requested not in ORDINARY:
        return Choice("off", f"attn_implementation={stock_requested!r} was asked for")
    asked = [f"batches that are not packed run attn_implementation={stock_requested!r}"] if stock_requested else []
    refusals: list[str] = []
    for backend in [BACKENDS[requested]] if by_name else [one for one in AUTO if one.considered(features)]:
        refusal = features.gap or backend.refuses(features) or (not by_name and backend.too_costly(features, elements))
        refusal = refusal or (attempt(backend, features) if attempt else "")
        if not refusal:
            reasons = (
                ["asked for", backend.reason(features)] if by_name else [backend.reason(features), *asked, *refusals]
            )
            return Choice(backend.name, "; ".join(reasons), backend.flattens, backend.refuses_compile)
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
    try:
        error = _error_of(backend, features)
        wrong = "" if error <= _MOST_ERROR else _OFF.format(error)
    except torch.OutOfMemoryError:
        raise
    except (*UNREADABLE, ImportError, AssertionError) as raised:
        wrong = f"{type(raised).__name__}: {raised}"
    if not wrong:
        return ""
    reason = f"{backend.name} failed its trial on this {features.device_type} ({wrong})"
    logger.warning(f"packed_attention: {reason}; another way is taken, and torch {torch.__version__} may be why")
    return reason


def _error_of(backend: Backend, features: ModelFeatures) -> float:
    """Return the relative error of two documents, forward and backward, against plain torch in fp32; or NaN."""
    device, dtype = torch.device(features.device_type), features.compute_dtype
    window = min(features.windows, default=None)
    heads, kv_heads = features.num_heads, features.kv_heads or features.num_heads
    shapes: list[tuple[int, ...]] = [
        (1, count, sum(_LENGTHS), features.head_dim) for count in (heads, kv_heads, kv_heads)
    ]
    shapes += [(heads,)] * features.sinks
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    scale, softcap = features.head_dim**-0.5, 30.0 if features.softcap else None
    sinks = (leaves[3], exact[3]) if features.sinks else (None, None)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        query, key, value = leaves[:3]
        call = AttentionCall(query, key, value, scale, window, sinks[0], softcap)
        out = backend.prepare(PackedBatch.from_lengths(_LENGTHS).to(device), features, device).attend(call)
        expected = []
        for query, key, value in zip(*(tensor.split(_LENGTHS, dim=2) for tensor in exact[:3]), strict=True):
            mask = band_mask(query.shape[2], window or query.shape[2], device)
            expected.append(document_attention(query, key, value, mask, scale, sinks[1], softcap)[0].transpose(1, 2))
        oracle = torch.cat(expected, dim=1)
        upstream = torch.randn(oracle.shape, generator=generator).to(device)
        found = [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]
        right = [oracle.detach(), *torch.autograd.grad(oracle, exact, upstream)]
    errors = [(one.float() - other).norm() / other.norm() for one, other in zip(found, right, strict=True)]
    return float(torch.stack(errors).max())  # NaN if one is
