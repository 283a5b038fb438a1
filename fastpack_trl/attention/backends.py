"""The backends and the one chooser. A further backend is one file, one entry here and one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpack_trl.attention import dense, flash_attention, flex, per_document, varlen, xformers
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import lacks
from fastpack_trl.packing.packed_batch import PackedBatch

RIGHT_PADDED = "padded_rows"
"""Not a kernel but another shape of the batch: right for every model (see `padded_rows.py`)."""

ORDINARY = ("eager", "sdpa")
"""Stock's implementations without a way of their own to keep packed documents apart: ours runs over them."""

LONG_DOCUMENTS: dict[tuple[int, ...], int] = {(9, 0): 4096}
"""Per compute capability: mean tokens per document from which one call per document beats one over the row.

On Hopper torch's varlen is FlashAttention-2, and `scaled_dot_product_attention` of a whole document has a faster
kernel: forward and backward of one document of 8,192 tokens take 3.8 ms against 6.9 (32/8 heads of 128), of 32,768
tokens 54 against 95; at a mean of 1,500 tokens varlen is ahead (2.1 against 2.5 ms at 8,192 tokens, 7.6 against 16 at
32,768). From ``bench/results/attention_cuda_2026-11-20.json``.
"""


class PackedLayer(Protocol):
    """What `prepare` returns: tensors and ints that cross a layer boundary, and the attention that reads them."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None,
        dropout: float,
        module: Any,
    ) -> Tensor: ...


class Backend(Protocol):
    """A way to compute packed attention through transformers' interface."""

    name: str

    def refuses(self, features: ModelFeatures) -> str:
        """Why this backend would be wrong for the model; empty where it is right."""
        ...

    def reason(self, features: ModelFeatures) -> str:
        """What the report says when it is chosen."""
        ...

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        """Build what the layers read; once per batch and device, hung on the batch."""
        ...


class Varlen:
    """`varlen.py` behind the `Backend` protocol."""

    name = "varlen"

    def refuses(self, features: ModelFeatures) -> str:
        if features.gap or (missing := lacks("varlen")):
            return features.gap or missing
        low = features.capability is not None and features.capability < varlen.LEAST_CAPABILITY
        reasons = {
            f"needs CUDA, the model is on {features.device_type}": features.device_type != "cuda",
            f"needs compute capability {_dotted(varlen.LEAST_CAPABILITY)}, "
            f"this device has {_dotted(features.capability)}": low,
            f"needs bf16 or fp16, this run computes in {features.compute_dtype} (bf16=False?)".replace(
                "torch.", ""
            ): features.compute_dtype not in varlen.DTYPES,
            f"head_dim {features.head_dim} is over its limit of {varlen.MAX_HEAD_DIM}": features.head_dim
            > varlen.MAX_HEAD_DIM,
            f"has no dropout, the model's is {features.dropout}": bool(features.dropout),
            "has no softcap": features.softcap,
        }
        return next((f"varlen {reason}" for reason, holds in reasons.items() if holds), "")

    def reason(self, features: ModelFeatures) -> str:
        dtype = str(features.compute_dtype).removeprefix("torch.")
        return f"torch's flash kernel, {dtype}, sm{''.join(map(str, features.capability or ()))}; {_needs(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        long_from = LONG_DOCUMENTS.get(features.capability or ())
        plain = not features.windows and not features.sinks
        rounded = -(-features.head_dim // 32) * 32
        elements = features.num_heads * rounded
        if plain and long_from is not None and batch.total_tokens >= long_from * len(batch.segment_lengths):
            layer = per_document.prepare(batch, features.windows, device)
            fits = varlen.can_index(max(batch.segment_lengths), elements)
            return layer._replace(compiled=varlen.prepare(batch, device, elements)) if fits else layer
        return varlen.prepare(batch, device, elements)


class PerDocument:
    """`per_document.py` behind the `Backend` protocol."""

    name = "per_document"

    def refuses(self, features: ModelFeatures) -> str:
        if features.gap:
            return features.gap
        if features.dropout:
            return f"attention dropout is {features.dropout}: no kernel per document has any"
        return ""

    def reason(self, features: ModelFeatures) -> str:
        missing = lacks("per_document on the CPU") if features.device_type == "cpu" else ""
        return "; ".join(filter(None, [features.device_type, _needs(features), missing and f"plain torch: {missing}"]))

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        return per_document.prepare(batch, features.windows, device)


class Dense:
    """`dense.py`: stock's attention with its mask built once per batch."""

    name = "sdpa"

    def refuses(self, features: ModelFeatures) -> str:
        if not features.gap and features.softcap and features.implementation == "sdpa":
            # transformers 5.17 lets gemma2 do so; later versions refuse it themselves.
            return "stock sdpa leaves out the softcap: load the model with attn_implementation='eager'"
        return features.gap

    def reason(self, features: ModelFeatures) -> str:
        return f"stock {features.implementation} with a dense mask built once per batch"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        return dense.prepare(batch, features.windows, device, features.implementation)


class Flex:
    """`flex.py` behind the `Backend` protocol."""

    name = "flex"

    def refuses(self, features: ModelFeatures) -> str:
        if features.gap:
            return features.gap
        if features.device_type != "cuda":
            return f"flex needs CUDA (it has no backward on {features.device_type})"
        return f"flex has no dropout, the model's is {features.dropout}" if features.dropout else ""

    def reason(self, features: ModelFeatures) -> str:
        return f"torch's flex attention; {_needs(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        return flex.prepare(batch, features.windows, device)


class Xformers:
    """`xformers.py` behind the `Backend` protocol."""

    name = "xformers"

    def refuses(self, features: ModelFeatures) -> str:
        if features.gap:
            return features.gap
        reasons = {
            "xformers is not installed: pip install 'fastpack-trl[xformers]'": find_spec("xformers") is None,
            f"xformers needs CUDA, the model is on {features.device_type}": features.device_type != "cuda",
            "xformers has no attention sinks": features.sinks,
            "xformers has no softcap": features.softcap,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def reason(self, features: ModelFeatures) -> str:
        return f"xFormers; {_needs(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        return xformers.prepare(batch, features.windows, device)


class FlashAttention:
    """`flash_attention.py` behind the `Backend` protocol, one per version of flash-attn."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, features: ModelFeatures) -> str:
        if features.gap:
            return features.gap
        if features.sinks and self.name == "flash_attention_2":
            return "flash_attention_2 has no attention sinks"
        if features.device_type != "cuda":
            return f"{self.name} needs CUDA, the model is on {features.device_type}"
        return flash_attention.missing(self.name)

    def reason(self, features: ModelFeatures) -> str:
        return f"installed flash-attn; {_needs(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        return flash_attention.prepare(batch, device, self.name)


def _needs(features: ModelFeatures) -> str:
    needs = [f"window {window}" for window in sorted(features.windows)]
    needs += ["sinks"] * features.sinks + ["softcap"] * features.softcap
    return ", ".join(needs) or "plain causal"


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


AUTO: tuple[Backend, ...] = (Varlen(), PerDocument(), Dense())
"""In the order of ``auto``: the first that is right is taken."""
_ASKED_FOR: tuple[Backend, ...] = (
    Flex(),
    Xformers(),
    *(FlashAttention(name) for name in flash_attention.NAMES),
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (*AUTO, *_ASKED_FOR)}


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs and why; `backend` is None for `padded_rows` and for stock (``path == "off"``)."""

    path: str
    reason: str
    backend: Backend | None = None


def _untried(_backend: Backend, _features: ModelFeatures) -> str:
    return ""


def choose(
    requested: str,
    features: ModelFeatures,
    *,
    stock_requested: str | None = None,
    attempt: Callable[[Backend, ModelFeatures], str] = _untried,
) -> Choice:
    """Pick the path for a model.

    Args:
        requested: ``auto``, ``off``, ``padded_rows`` or the name of a backend.
        features: what the model's attention needs.
        stock_requested: an `attn_implementation` that the user asked for by name. One of `ORDINARY` says how batches
            that are not packed run; ``auto`` leaves packed rows to any other, which has a kernel for them.
        attempt: why a backend that should be right fails on this machine; empty where it runs (`trial.failure`).

    Raises:
        ValueError: the requested backend does not exist, or would be wrong for the model; names the remedy.
    """
    if requested == "off":
        return Choice("off", "switched off")
    if requested == RIGHT_PADDED:
        return Choice(RIGHT_PADDED, "asked for")
    if requested != "auto":
        if requested not in BACKENDS:
            raise ValueError(
                f"packed_attention={requested!r} does not exist: use one of auto, {', '.join(BACKENDS)}, "
                f"{RIGHT_PADDED}, off"
            )
        refusal = BACKENDS[requested].refuses(features) or attempt(BACKENDS[requested], features)
        if refusal:
            raise ValueError(
                f"packed_attention={requested!r} cannot be used here: {refusal}; use packed_attention='auto'"
            )
        return Choice(requested, f"asked for; {BACKENDS[requested].reason(features)}", BACKENDS[requested])
    if stock_requested is not None and stock_requested not in ORDINARY:
        return Choice("off", f"attn_implementation={stock_requested!r} was asked for")
    asked = [f"batches that are not packed run attn_implementation={stock_requested!r}"] if stock_requested else []
    refusals: list[str] = []
    for backend in AUTO:
        refusal = backend.refuses(features) or attempt(backend, features)
        if not refusal:
            return Choice(backend.name, "; ".join([backend.reason(features), *asked, *refusals]), backend)
        refusals.append(refusal)
    return Choice(RIGHT_PADDED, "; ".join([refusals[-1], *asked]))
