"""`Families`: a padded batch of prompts and completions as one row without padding, each prompt in it once.

The trainers for preferences and online learning score completions, of which several share a prompt. The row is found on
the host, in the padded batch that TRL's own collator makes, and is read from that batch by index on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.packed_inputs import IntArray
from fastpack_trl.packing.prefixes import LEAST_SHARED, packed_batch, share

KEY = "fastpack_families"
"""Of a collated batch: under it the `Families` of each padded tensor of token ids, by its key."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Families:
    """The row of a padded batch, for the model, and the places in it that the head reads.

    Two completions of one prompt (1, 2), shared from ``least=1`` on, whose padded batch is
    ``[[1, 2, 3, 4], [1, 2, 5, 0]]`` with ``completion_mask=[[0, 0, 1, 1], [0, 0, 1, 0]]``, are the row
    ``[1, 2, 3, 4, 5]``: ``tokens=[0, 1, 2, 3, 6]``, and the positions that the layers see are ``[0, 1, 2, 3, 2]``.
    The tokens 3, 4 and 5 are scored by the hidden states at ``positions=[1, 2, 1]``; their log-probabilities belong at
    ``places=[1, 2, 4]`` of the flattened (2, 3) result; ``copies=[2, 2, 1, 1, 1]``. With prompts repeated the row is
    ``[1, 2, 3, 4, 1, 2, 5]``.

    Attributes:
        batch: the segments of the row.
        tokens: (total_tokens,) int64, where each token of the row is in the flattened (rows, width) padded batch.
        positions: (N,) int64, of the row: what the head reads, in the order of `places`.
        places: (N,) int64, in the flattened (rows, width - 1) result; without completions the rows themselves.
        copies: (1, total_tokens) int64, rows of the padded batch that have the token; None where it is 1 everywhere.
        shape: rows and width of the padded batch.
        shared: tokens that the row spares by sharing.
    """

    batch: PackedBatch
    tokens: Tensor
    positions: Tensor
    places: Tensor
    copies: Tensor | None
    shape: tuple[int, int]
    shared: int

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Families:
        """Copy to `device`, without waiting where the tensors are pinned."""
        pinned = non_blocking or self.tokens.is_pinned()
        return self._map(lambda value: value.to(device, non_blocking=pinned))

    def pin_memory(self) -> Families:
        """Copy to page-locked host memory; called by `torch.utils.data.DataLoader`."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, convert: Callable[[Any], Any]) -> Families:
        names = ("batch", "tokens", "positions", "places", "copies")
        found = {name: convert(value) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **found)

    def row(self, padded: Tensor) -> Tensor:
        """Return (1, total_tokens) of a (rows, width) tensor on the same device."""
        return padded.flatten().index_select(0, self.tokens)[None]


def find_families(
    ids: Tensor, attention_mask: Tensor, scored: Tensor, *, share: bool = True, least: int = LEAST_SHARED
) -> Families | str:
    """Return the row of a padded batch of prompts and completions, or why there is none.

    Args:
        ids: (rows, width) integers on the host, padded on either side.
        attention_mask: (rows, width), 0 at padding.
        scored: (rows, width), not 0 where the log-probability of the token is asked for. The first column never is.
        share: False: prompts are repeated.
        least: tokens below which a common prefix is repeated.
    """
    rows = _Rows.read(ids, attention_mask)
    if isinstance(rows, str):
        return rows
    is_scored = scored.numpy() != 0
    is_scored[:, 0] = False
    owner, column = is_scored.nonzero()
    if ((column < rows.starts[owner]) | (column >= rows.ends[owner])).any():
        return "padding is scored"
    if (column == rows.starts[owner]).any():
        return "a completion without a prompt is padded on the left"
    return rows.families(owner, column - 1, owner * (ids.shape[1] - 1) + column - 1, least if share else None)


def find_pairs(
    ids: Tensor, attention_mask: Tensor, pad_token_id: int, *, share: bool = True, least: int = LEAST_SHARED
) -> Families | str:
    """Return the row of a padded batch that is read at the last token of each row that is not padding.

    Args:
        ids, attention_mask, share, least: as of `find_families`.
        pad_token_id: by which transformers' classifiers find the token that they read: the last of another id.
    """
    rows = _Rows.read(ids, attention_mask)
    if isinstance(rows, str):
        return rows
    count, width = ids.shape
    others = rows.ids != pad_token_id
    last = np.where(others.any(1), width - 1 - others[:, ::-1].argmax(1), 0)
    if ((last < rows.starts) | (last >= rows.ends)).any():
        return "the token that a classifier reads is padding"
    return rows.families(np.arange(count), last, np.arange(count), least if share else None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A padded batch, and the columns at which the tokens of each row start and end."""

    ids: IntArray
    starts: IntArray
    ends: IntArray

    @classmethod
    def read(cls, ids: Tensor, attention_mask: Tensor) -> _Rows | str:
        """Return the batch, or why the tokens of a row are not one stretch."""
        real = attention_mask.numpy() != 0
        if real.shape != ids.shape or real.ndim != 2:
            return f"attention_mask of shape {real.shape} for tokens of shape {tuple(ids.shape)}"
        lengths, starts = real.sum(1), real.argmax(1)
        if not lengths.sum():
            return "a batch without a token"
        columns = np.arange(real.shape[1])
        if not (real == ((columns >= starts[:, None]) & (columns < (starts + lengths)[:, None]))).all():
            return "padding in the middle of a row"
        return cls(ids.numpy(), starts, starts + lengths)

    def families(self, owner: IntArray, column: IntArray, places: IntArray, least: int | None) -> Families:
        """Return the packed row for a head that reads `column` of the rows `owner`; prefixes repeated if no `least`."""
        width, lengths = self.ids.shape[1], self.ends - self.starts
        first = lengths.cumsum() - lengths  # of each row among the tokens that are not padding
        tokens = np.arange(int(lengths.sum())) + (np.arange(len(lengths)) * width + self.starts - first).repeat(lengths)
        positions = first[owner] + column - self.starts[owner]
        shared = share(self.ids.ravel()[tokens], lengths[lengths > 0], least) if least is not None else None
        if shared is None:
            batch, copies = PackedBatch.from_lengths(lengths[lengths > 0].tolist()), None
        else:
            batch, positions = packed_batch(shared), shared.token_of[positions]
            copies = torch.from_numpy(np.bincount(shared.token_of))[None]
        spared = len(tokens) - batch.total_tokens
        return Families(
            batch=batch,
            tokens=torch.from_numpy(tokens if shared is None else tokens[shared.source_of]),
            positions=torch.from_numpy(positions),
            places=torch.from_numpy(places),
            copies=copies,
            shape=(len(lengths), width),
            shared=spared,
        )


@dataclass
class FamiliesCollator:
    """Any collator with TRL's keys, and the `Families` of what it collates under `KEY`, found in the same worker.

    Args:
        inner: the collator.
        find: from a batch and the prefix of its keys (``""``, ``"KL_"``) to the row of ``<prefix>input_ids``, or why
            there is none.
        share: False: prompts are repeated.
    """

    inner: Callable[[list[Any]], Any]
    find: Callable[..., Families | str]
    share: bool

    def __call__(self, examples: list[Any]) -> Any:
        """Collate, and add the rows that are found; a text where one is not: the reason."""
        batch = self.inner(examples)
        if not isinstance(batch, dict):
            return batch
        return batch | {KEY: {key: self.find(batch, key[:-9], share=self.share) for key in _ids_keys(batch)}}


def _ids_keys(batch: Mapping[str, Any]) -> Iterator[str]:
    for key, value in batch.items():
        if key.endswith("input_ids") and isinstance(value, Tensor) and f"{key[:-9]}attention_mask" in batch:
            yield key


def completions(batch: Mapping[str, Any], prefix: str, *, share: bool) -> Families | str:
    """Find the row of DPO's and KTO's batches."""
    if f"{prefix}completion_mask" not in batch:
        return "a batch without completion_mask"
    ids, mask, scored = (batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
    return find_families(ids, mask, scored, share=share)


@dataclass
class Pairs:
    """Finds the row of a reward trainer's batches.

    Args:
        pad_token_id: of the model's config.
    """

    pad_token_id: int

    def __call__(self, batch: Mapping[str, Any], prefix: str, *, share: bool) -> Families | str:
        """Find the row of pairs."""
        return find_pairs(batch["input_ids"], batch["attention_mask"], self.pad_token_id, share=share)
