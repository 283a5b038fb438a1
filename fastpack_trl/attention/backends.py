"""The list of backends, one line each, the choice between them, and the trial before one is chosen.

Backends call operators of torch and of others that move, and kernels that a build may lack. What fails in a trial, one
tiny forward and backward on the device, would fail in the first step; what sees a wrong token would train on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fastpack_trl.attention import dense, flash_attention_4, per_document, varlen, xformers
from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.attention.reference import band_mask, document_attention
from fastpack_trl.config import refuse_removed
from fastpack_trl.model.facts import UNREADABLE, ModelFeatures
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import Choice

logger = logging.getLogger(__name__)

_LARGEST_WINDOW = 256  # tokens: a trial stays tiny
_PAST = 3  # tokens of a document past the window
_SHORT = (7, 5)  # tokens per document without one
_MOST_ERROR = 0.1
"""Relative, of a trial in 16 bits, with gradients of sinks that nearly cancel; a wrong factor is far beyond."""

ORDINARY = ("eager", "sdpa")
"""Stock's implementations without a way of their own to keep packed documents apart: ours runs over them."""

AUTO: tuple[Backend, ...] = (
    flash_attention_4.FlashAttention4(), varlen.Varlen(), per_document.PerDocument(), dense.Dense(),
)  # fmt: skip
"""In the order of ``auto``: the first that is right is taken."""
BY_NAME: tuple[Backend, ...] = (xformers.Xformers(),)
"""Taken only where the user names one."""

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*AUTO, *BY_NAME)}


def _choice(backend: Backend, features: ModelFeatures, *reasons: str) -> Choice:
    return Choice(backend.name, "; ".join(reasons), backend.flattens, backend.refuses_compile(features))


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
        stock_requested: an `attn_implementation` that the user asked for by name. One of `ORDINARY` says how batches
            that are not packed run; ``auto`` leaves packed rows to any other, which has a kernel for them.
        attempt: returns why a backend that should be right fails on this machine, or ``""`` (`failure`); None: untried.
        elements: of the queries of the whole run (`Backend.too_costly`).

    Raises:
        ValueError: the requested backend does not exist, or would be wrong for the model; names the remedy.
    """

    def refused(backend: Backend, elements: float = math.inf) -> str:
        reason = features.gap or backend.refuses(features) or backend.too_costly(features, elements)
        return reason or (attempt(backend, features) if attempt else "")

    if requested == "off":
        return Choice("off", "switched off")
    if requested != "auto":
        if requested not in BACKENDS:
            refuse_removed([f"packed_attention={requested!r}"])
            raise ValueError(
                f"packed_attention={requested!r} does not exist: use one of auto, {', '.join(BACKENDS)}, off"
            )
        backend = BACKENDS[requested]
        if refusal := refused(backend):
            raise ValueError(
                f"packed_attention={requested!r} cannot be used here: {refusal}; use packed_attention='auto'"
            )
        return _choice(backend, features, "asked for", backend.reason(features))
    if stock_requested is not None and stock_requested not in ORDINARY:
        return Choice("off", f"attn_implementation={stock_requested!r} was asked for")
    asked = [f"batches that are not packed run attn_implementation={stock_requested!r}"] if stock_requested else []
    refusals: list[str] = []
    for backend in AUTO:
        if not backend.considered(features):
            continue
        refusal = refused(backend, elements)
        if not refusal:
            return _choice(backend, features, backend.reason(features), *asked, *refusals)
        refusals.append(refusal)
    return Choice(PADDED_DOCUMENTS, "; ".join([refusals[-1], *asked]))


def failure(backend: Backend, features: ModelFeatures) -> str:
    """Return why `backend` does not run, or runs wrong, on this machine for such a model, or ``""``.

    Tried once per process and kind of attention. A backend that fails is logged.
    """
    if not backend.tried or features.device_type == "meta":
        return ""
    # Families with the same attention share one trial.
    return _failure(backend, replace(features, model_type="", implementation=""))


@lru_cache(maxsize=256)
def _failure(backend: Backend, features: ModelFeatures) -> str:
    try:
        wrong = _try(backend, features)
    except torch.OutOfMemoryError:
        raise
    except (*UNREADABLE, ImportError, AssertionError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        return ""
    reason = f"{backend.name} failed its trial on this {features.device_type} ({wrong})"
    logger.warning(f"packed_attention: {reason}; another way is taken, and torch {torch.__version__} may be why")
    return reason


def _try(backend: Backend, features: ModelFeatures) -> str:
    """Run two documents; the gradient of the last query of each shows in the values what it saw."""
    device, dtype = torch.device(features.device_type), features.compute_dtype
    window = min((size for size in features.windows if size <= _LARGEST_WINDOW), default=None)
    # The second document is shorter than the window, which would hide that it sees the first.
    lengths = _SHORT if window is None else (window + _PAST, max(1, min(_SHORT[1], window - 1)))
    heads, kv_heads = features.num_heads, features.kv_heads or features.num_heads
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [
        (1, count, sum(lengths), features.head_dim) for count in (heads, kv_heads, kv_heads)
    ]
    shapes += [(heads,)] * features.sinks
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    batch, scale = PackedBatch.from_lengths(lengths).to(device), features.head_dim**-0.5
    sinks, softcap = leaves[3] if features.sinks else None, 30.0 if features.softcap else None
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        query, key, value = leaves[:3]
        call = AttentionCall(query, key, value, scale, window, sinks, softcap)
        out = backend.prepare(batch, features, device).attend(call)
        for start, end in pairwise((0, lengths[0], sum(lengths))):
            gradients = torch.autograd.grad(out[:, end - 1].float().sum(), leaves, retain_graph=True)
            if not all(bool(torch.isfinite(result).all()) for result in (out, *gradients)):
                return "its results are not finite"
            seen = gradients[2][0].abs().amax((0, 2)).nonzero().flatten().tolist()
            if seen != list(range(max(start, end - (window or end)), end)):
                return "a query sees other tokens than those before it in its document and window"
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
        found = [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        expected = _in_fp32(exact, lengths, window, scale, softcap)
        oracle = [expected, *torch.autograd.grad(expected, exact, upstream)]
    pairs = ((one.detach().float(), other.detach()) for one, other in zip(found, oracle, strict=True))
    error = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    return f"its results are {error:.1%} off those of plain torch" if error > _MOST_ERROR else ""


def _in_fp32(
    leaves: list[Tensor], lengths: tuple[int, ...], window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute the same attention in plain torch: (1, total_tokens, num_heads, head_dim)."""
    outs, sinks = [], leaves[3] if len(leaves) > 3 else None
    for query, key, value in zip(*(tensor.split(lengths, dim=2) for tensor in leaves[:3]), strict=True):
        mask = band_mask(query.shape[2], window or query.shape[2], query.device)
        outs.append(document_attention(query, key, value, mask, scale, sinks, softcap)[0])
    return torch.cat(outs, dim=2).transpose(1, 2)
