"""The interface of a backend of packed attention, and one attention call, which every backend takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import fla


class AttentionCall(NamedTuple):
    """One attention call of one layer over a packed row; a tuple, which `torch.compile` takes apart without a guard."""

    query: Tensor
    """(1, num_heads, total_tokens, head_dim)."""
    key: Tensor
    """(1, num_kv_heads, total_tokens, head_dim)."""
    value: Tensor
    """(1, num_kv_heads, total_tokens, value head_dim): that of the key, or another (MLA)."""
    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Tokens that each query sees, itself included; None: all before it in its document."""
    sinks: Tensor | None = None
    """(num_heads,): one logit per head that takes part in the softmax and has no value."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)``."""
    dropout: float = 0.0
    """Probability that an attention weight is dropped."""
    module: Any = None
    """The attention module, for transformers' own functions."""


class PackedLayer(Protocol):
    """Tensors and ints that cross a layer boundary, made once per batch, and the attention that reads them."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return causal attention inside each document: (1, total_tokens, num_heads, value head_dim), contiguous.

        Raises:
            ValueError: the backend does not support the call; names the fix.
        """
        ...


class Backend(ABC):
    """One way to compute packed attention through transformers' interface; `backends.py` lists them.

    Attributes:
        name: its value of `FastSFTConfig.packed_attention`.
        tried: `backends.failure` runs it on a few tokens before it is chosen.
        flattens: batches that TRL pads become rows without padding, which it processes as fast.
        shares: it attends over rows whose documents share a prefix (`PackedBatch.shared`).
        sees_blocks: tokens of an image attend to each other (`PackedBatch.blocks`).
    """

    name: str
    tried = True
    flattens = False
    shares = sees_blocks = False

    @abstractmethod
    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        """Yield why it would be wrong for a model, false ones included, if the interface reaches it (no `gap`)."""

    def refuses(self, features: ModelFeatures) -> str:
        """Return the first reason against it, or ``""``."""
        return first_reason(self.why_not(features))

    def considered(self, features: ModelFeatures) -> bool:
        """Return whether ``auto`` considers it, and reports why it refuses."""
        return True

    @abstractmethod
    def reason(self, features: ModelFeatures) -> str:
        """Return the reason that the report gives when it is chosen."""

    @abstractmethod
    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PackedLayer:
        """Build the layers' input, once per batch and device; it lives as long as the batch."""

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        """Return why it cannot attend over static batches of this bucket, or ``""``.

        A CUDA graph runs their layers again for other documents, so layers may hold tensors and values of shapes only.
        """
        return f"{self.name} prepares its layers for the documents of one batch"


def gather_keys(tensor: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Return the tokens of each key along `dim`, some more than once; their gradients are summed in fp32.

    Of two copies, as a prompt of a pair has, any order gives the same sum; of more, the order on CUDA is that of atomic
    additions unless `torch.use_deterministic_algorithms` is on.
    """
    exact = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(exact).index_select(dim, index).to(tensor.dtype)


def described(features: ModelFeatures) -> str:
    """Return a model's features beyond causal attention: ``window 128, sinks``, ``gated delta rule over chunks``."""
    parts = [f"window {window}" for window in sorted(features.windows)]
    parts += ["sinks"] * features.sinks + ["softcap"] * features.softcap
    parts += [fla.described(mixer, features) for mixer in sorted(features.mixers)]
    return ", ".join(parts) or "plain causal"


def shared_refusal(backend: Backend, features: ModelFeatures) -> str:
    """Return why rows with shared prefixes cannot run in a model with `backend`, or ``""``."""
    if features.mixers:
        return f"a recurrent state ({', '.join(sorted(features.mixers))}) cannot branch after a prefix"
    return "" if backend.shares else f"{backend.name} does not support shared prefixes"
