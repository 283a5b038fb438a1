"""The list of backends, one line each, and the choice between them. Each backend is whole in its own file."""

from __future__ import annotations

from collections.abc import Callable

from fastpack_trl.attention import dense, flash_attention, flex, per_document, varlen, xformers
from fastpack_trl.attention.interface import Backend
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.run import PADDED_ROWS, Choice

ORDINARY = ("eager", "sdpa")
"""Stock's implementations without a way of their own to keep packed documents apart: ours runs over them."""

AUTO: tuple[Backend, ...] = (varlen.Varlen(), per_document.PerDocument(), dense.Dense())
"""In the order of ``auto``: the first that is right is taken."""
BY_NAME: tuple[Backend, ...] = (
    flex.Flex(),
    xformers.Xformers(),
    *map(flash_attention.FlashAttention, flash_attention.NAMES),
)
"""Taken only where the user names one."""

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*AUTO, *BY_NAME)}


def _choice(backend: Backend, features: ModelFeatures, *reasons: str) -> Choice:
    return Choice(backend.name, "; ".join(reasons), backend.flattens, backend.refuses_compile(features))


def _untried(_backend: Backend, _features: ModelFeatures) -> str:
    return ""


def choose(
    requested: str,
    features: ModelFeatures,
    *,
    stock_requested: str | None = None,
    attempt: Callable[[Backend, ModelFeatures], str] = _untried,
) -> Choice:
    """Choose the path for a model.

    Args:
        requested: ``auto``, ``off``, ``padded_rows`` or the name of a backend.
        features: of the model's attention.
        stock_requested: an `attn_implementation` that the user asked for by name. One of `ORDINARY` says how batches
            that are not packed run; ``auto`` leaves packed rows to any other, which has a kernel for them.
        attempt: returns why a backend that should be right fails on this machine, or ``""`` (`trial.failure`).

    Raises:
        ValueError: the requested backend does not exist, or would be wrong for the model; names the remedy.
    """
    if requested == "off":
        return Choice("off", "switched off")
    if requested == PADDED_ROWS:
        return Choice(PADDED_ROWS, "asked for")
    if requested != "auto":
        if requested not in BACKENDS:
            raise ValueError(
                f"packed_attention={requested!r} does not exist: use one of auto, {', '.join(BACKENDS)}, "
                f"{PADDED_ROWS}, off"
            )
        backend = BACKENDS[requested]
        refusal = features.gap or backend.refuses(features) or attempt(backend, features)
        if refusal:
            raise ValueError(
                f"packed_attention={requested!r} cannot be used here: {refusal}; use packed_attention='auto'"
            )
        return _choice(backend, features, "asked for", backend.reason(features))
    if stock_requested is not None and stock_requested not in ORDINARY:
        return Choice("off", f"attn_implementation={stock_requested!r} was asked for")
    asked = [f"batches that are not packed run attn_implementation={stock_requested!r}"] if stock_requested else []
    refusals: list[str] = []
    for backend in AUTO:
        refusal = features.gap or backend.refuses(features) or attempt(backend, features)
        if not refusal:
            return _choice(backend, features, backend.reason(features), *asked, *refusals)
        refusals.append(refusal)
    return Choice(PADDED_ROWS, "; ".join([refusals[-1], *asked]))
