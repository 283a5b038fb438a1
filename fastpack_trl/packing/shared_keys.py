"""`SharedKeys`: the tokens that each segment of a row attends to; `Documents`: the documents that a row stands for.

Both are made once per batch, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int64]]


class TensorFields:
    """Base of dataclasses whose tensors, and those of their parts, move together like one tensor."""

    __slots__ = ()

    def map(self, convert: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy whose tensors are what `convert` returns for them."""
        converted: dict[str, Any] = {}
        for name in (each.name for each in fields(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, Tensor):
                converted[name] = convert(value)
            elif isinstance(value, TensorFields):
                converted[name] = value.map(convert)
        return replace(self, **converted)  # type: ignore[type-var]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Copy to `device`; asynchronous if the tensors are pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking or tensor.is_pinned()))

    def pin_memory(self) -> Self:
        """Copy to page-locked host memory; called by `torch.utils.data.DataLoader`."""
        return self.map(Tensor.pin_memory)


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeys(TensorFields):
    """The keys of segments whose prefix is elsewhere in the row.

    Segments of 4 and 1 tokens, of which the second continues the first two tokens of the first:
    ``prefix_lengths=(0, 2)``, ``key_index=[0, 1, 2, 3, 0, 1, 4]``, ``cu_seqlens_k=[0, 4, 7]``, ``max_seqlen_k=4``.

    Query ``i`` of a segment is ``len(keys) - len(segment) + i``-th of its keys, so causality is aligned bottom-right,
    and distances between queries and keys are those of the documents.

    Attributes:
        prefix_lengths: on the host, for each segment of `PackedBatch.cu_seqlens` the keys before its own tokens.
        key_index: (total_keys,) int64, the tokens of each segment's keys: its prefix, then its own.
        cu_seqlens_k: (num_segments + 1,) int32, in keys.
        max_seqlen_k: keys of the segment that has most, a host int.
    """

    prefix_lengths: tuple[int, ...]
    key_index: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int

    @classmethod
    def own(cls, cu_seqlens: Tensor, lengths: Sequence[int]) -> SharedKeys:
        """Return the keys of segments without a prefix, on the device of their `cu_seqlens`."""
        index = torch.arange(sum(lengths), device=cu_seqlens.device)
        return cls((0,) * len(lengths), index, cu_seqlens, max(lengths))


@dataclass(frozen=True, slots=True, eq=False)
class Documents(TensorFields):
    """The documents that a row with shared prefixes stands for, one after the other as without sharing.

    Documents of 3 and 4 tokens that share 2: ``token_of=[0, 1, 2, 0, 1, 3, 4]``.

    Attributes:
        lengths: tokens of each document, on the host.
        token_of: (document_tokens,) int64, for each of their tokens, its token in the row.
        loss_weights: (num_loss_positions,) fp32, how many documents count each of `PackedBatch.loss_positions`.
        copies: (row_tokens,) fp32, how many documents have each token of the row; 0 for padding.
        loss_tokens: their sum, on the host.
        capacity: tokens of the row that it would be without sharing, padding included.
        parts: document tokens of each part of a merged row; empty for a row by itself.
    """

    lengths: tuple[int, ...]
    token_of: Tensor
    loss_weights: Tensor
    copies: Tensor
    loss_tokens: int
    capacity: int
    parts: tuple[int, ...] = ()

    @classmethod
    def own(cls, lengths: Sequence[int], loss_positions: Tensor, capacity: int) -> Documents:
        """Return those of a row in which nothing is shared, on its device."""
        token_of = torch.arange(sum(lengths), device=loss_positions.device)
        weights, copies = (token_of.new_ones(n, dtype=torch.float32) for n in (loss_positions.numel(), len(token_of)))
        return cls(tuple(lengths), token_of, weights, copies, loss_positions.numel(), capacity)
