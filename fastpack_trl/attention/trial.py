"""One tiny forward and backward of a backend on the device, before it is chosen.

Backends call operators of torch and of others that move, and kernels that a build may lack. What fails here would fail
in the first step; what sees a wrong token here would train on it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import torch

from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch

logger = logging.getLogger(__name__)

_LARGEST_WINDOW = 256  # tokens: a trial stays tiny
_PAST = 3  # tokens of a document past the window
_SHORT = (7, 5)  # tokens per document without one
_FAILS = (
    RuntimeError, AttributeError, TypeError, ValueError, LookupError, ImportError, NotImplementedError, AssertionError,
)  # fmt: skip


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
    except _FAILS as error:
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

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    query = draw(1, heads, sum(lengths), features.head_dim)
    key, value = (draw(1, kv_heads, sum(lengths), features.head_dim) for _ in range(2))
    sinks = draw(heads) if features.sinks else None
    batch = PackedBatch.from_lengths(lengths).to(device)
    softcap = 30.0 if features.softcap else None
    call = AttentionCall(query, key, value, features.head_dim**-0.5, window, sinks, softcap)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        out = backend.prepare(batch, features, device).attend(call)
        leaves = [query, key, value, *([sinks] if sinks is not None else [])]
        end = 0
        for length in lengths:
            start, end = end, end + length
            gradients = torch.autograd.grad(out[:, end - 1].float().sum(), leaves, retain_graph=True)
            if not all(bool(torch.isfinite(result).all()) for result in (out, *gradients)):
                return "its results are not finite"
            seen = gradients[2][0].abs().amax((0, 2)).nonzero().flatten().tolist()
            if seen != list(range(max(start, end - (window or length)), end)):
                return "a query sees other tokens than those before it in its document and window"
    return ""
