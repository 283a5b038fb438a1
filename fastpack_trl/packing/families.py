"""`Families`: a padded batch of prompts and completions as one row without padding, each prompt in it once.

The trainers for preferences and online learning score completions, of which several share a prompt. The row is found on
the host, in the padded batch that TRL's own collator makes, and is read from that batch by index on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch

KEY = "fastpack_families"
"""Of a collated batch: under it the `Families` of each padded tensor of token ids, by its key."""
LEAST_SHARED = 16
"""Tokens that sharing a prefix has to spare: a segment of its own costs as much as these."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


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

    Rows with equal tokens before the first that is scored are a family; they share these, and what else is equal.

    Args:
        ids: (rows, width) integers on the host, padded on either side.
        attention_mask: (rows, width), 0 at padding.
        scored: (rows, width), not 0 where the log-probability of the token is asked for. The first column never is.
        share: False: prompts are repeated.
        least: tokens that sharing a prefix has to spare.
    """
    rows = _read(ids, attention_mask)
    if isinstance(rows, str):
        return rows
    asked = scored.numpy() != 0
    asked[:, 0] = False
    owner, column = asked.nonzero()
    if ((column < rows.starts[owner]) | (column >= rows.ends[owner])).any():
        return "padding is scored"
    if (column == rows.starts[owner]).any():
        return "a completion without a prompt is padded on the left"
    first = np.where(asked.any(1), asked.argmax(1), rows.ends)
    prompts: dict[bytes, list[int]] = {}
    for index, (start, end) in enumerate(zip(rows.starts.tolist(), first.tolist(), strict=True)):
        prompts.setdefault(rows.ids[index, start:end].tobytes(), []).append(index)
    prompts.pop(b"", None)
    layout = _lay_out(rows, prompts.values() if share else (), least)
    return layout.families(owner, column - 1, owner * (ids.shape[1] - 1) + column - 1)


def find_pairs(
    ids: Tensor, attention_mask: Tensor, pad_token_id: int, *, share: bool = True, least: int = LEAST_SHARED
) -> Families | str:
    """Return the row of a padded batch whose halves are pairs, read at the last token that is not padding.

    Args:
        ids, attention_mask, share, least: as of `find_families`. No prompt is known: pairs share all that is equal.
        pad_token_id: by which transformers' classifiers find the token that they read: the last of another id.
    """
    rows = _read(ids, attention_mask)
    if isinstance(rows, str):
        return rows
    count, width = ids.shape
    others = rows.ids != pad_token_id
    last = np.where(others.any(1), width - 1 - others[:, ::-1].argmax(1), 0)
    if ((last < rows.starts) | (last >= rows.ends)).any():
        return "the token that a classifier reads is padding"
    pairs = [[index, index + count // 2] for index in range(count // 2)] if share and count % 2 == 0 else []
    return _lay_out(rows, pairs, least).families(np.arange(count), last, np.arange(count))


@dataclass(frozen=True, slots=True)
class _Rows:
    ids: Ints
    starts: Ints
    ends: Ints


def _read(ids: Tensor, attention_mask: Tensor) -> _Rows | str:
    """Return where the tokens of each row are, or why they are not one stretch."""
    real = attention_mask.numpy() != 0
    if real.shape != ids.shape or real.ndim != 2:
        return f"attention_mask of shape {real.shape} for tokens of shape {tuple(ids.shape)}"
    lengths, starts = real.sum(1), real.argmax(1)
    if not lengths.sum():
        return "a batch without a token"
    columns = np.arange(real.shape[1])
    if not (real == ((columns >= starts[:, None]) & (columns < (starts + lengths)[:, None]))).all():
        return "padding in the middle of a row"
    return _Rows(ids.numpy(), starts, starts + lengths)


class _Layout:
    """Segments one after the other, and where each row of the padded batch has its own."""

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.sources: list[Ints] = []
        self.copies: list[Ints] = []
        self.total = self.shared = 0
        count = len(rows.ids)
        self.prefix: Ints = np.zeros(count, np.int64)
        """Tokens of each row that are in a segment of its family."""
        self.prefix_start: Ints = np.zeros(count, np.int64)
        self.rest_start: Ints = np.zeros(count, np.int64)
        """Where in the packed row these begin, and where the tokens after them do."""

    def add(self, row: int, start: int, end: int, parent: int = -1, copies: int = 1, of: int = 0) -> None:
        """Append columns `start` to `end` of a row; the first `of` of them stand for `copies` rows."""
        self.lengths.append(end - start)
        self.parents.append(parent)
        self.sources.append(np.arange(start, end) + row * self.rows.ids.shape[1])
        self.copies.append(np.where(np.arange(end - start) < of, copies, 1))
        self.total += end - start

    def families(self, owner: Ints, column: Ints, places: Ints) -> Families:
        """Return the result, for a head that reads `column` of the rows `owner`."""
        offset = column - self.rows.starts[owner]
        before = offset < self.prefix[owner]
        positions = np.where(
            before, self.prefix_start[owner] + offset, self.rest_start[owner] + offset - self.prefix[owner]
        )
        batch = PackedBatch.from_segments(self.lengths, self.parents)
        copies = np.concatenate(self.copies)
        return Families(
            batch=batch,
            tokens=torch.from_numpy(np.concatenate(self.sources)),
            positions=torch.from_numpy(positions),
            places=torch.from_numpy(places),
            copies=torch.from_numpy(copies)[None] if self.shared else None,
            shape=(self.rows.ids.shape[0], self.rows.ids.shape[1]),
            shared=self.shared,
        )


def _lay_out(rows: _Rows, families: Iterable[Sequence[int]], least: int) -> _Layout:
    """Return the segments of a batch: families first to last, at the place of their first row."""
    layout, starts, ends = _Layout(rows), rows.starts.tolist(), rows.ends.tolist()
    family_of = {members[0]: members for members in families if len(members) > 1}
    prefixes = {first: _common_prefix(rows, members) for first, members in family_of.items()}
    placed: set[int] = set()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if row in placed or end == start:
            continue
        members, prefix = family_of.get(row, [row]), prefixes.get(row, 0)
        if prefix * (len(members) - 1) < max(1, least):
            layout.rest_start[row] = layout.total
            layout.add(row, start, end)
            continue
        placed.update(members)
        layout.shared += prefix * (len(members) - 1)
        layout.prefix[members] = prefix
        layout.prefix_start[members] = layout.total
        longer = [member for member in members if ends[member] - starts[member] > prefix]
        if len(longer) < 2:  # the others are its beginning: one document
            whole = longer[0] if longer else row
            layout.rest_start[members] = layout.total + prefix
            layout.add(whole, starts[whole], ends[whole], copies=len(members), of=prefix)
            continue
        parent = len(layout.lengths)
        layout.add(row, start, start + prefix, copies=len(members), of=prefix)
        for member in longer:
            layout.rest_start[member] = layout.total
            layout.add(member, starts[member] + prefix, ends[member], parent)
    return layout


def _common_prefix(rows: _Rows, members: Sequence[int]) -> int:
    """Return how many first tokens all rows of a family have in common."""
    first, *others = (rows.ids[row, rows.starts[row] : rows.ends[row]] for row in members)
    common = len(first)
    for other in others:
        common = min(common, len(other))
        unlike = (first[:common] != other[:common]).nonzero()[0]
        common = int(unlike[0]) if len(unlike) else common
    return common


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
