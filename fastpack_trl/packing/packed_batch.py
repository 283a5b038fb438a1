"""`PackedBatch`: the metadata of a packed row, built once per batch, on the host, then only read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.shared_keys import Documents, Ints, SharedKeys, TensorFields

IGNORE_INDEX = -100
"""Label of a token that no loss counts (the convention of torch's and transformers' losses)."""

T = TypeVar("T")
_EDITED = -2  # no count of edits has this value


class Part(NamedTuple):
    """A micro-batch inside of a merged row: ``Part(tokens=509, capacity=512, loss_tokens=480)``."""

    tokens: int
    """Tokens of its documents, all of which are in the merged row."""
    capacity: int
    """Tokens of the row that it was, padding included."""
    loss_tokens: int
    """Of `PackedBatch.loss_positions`, in the order of the parts."""
    counted: int = 0
    """Tokens that the loss counts, where documents share some of these positions; 0: as many as there are."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorVersion:
    """A tensor from which something was made, and its count of in-place edits at that time.

    torch counts edits of a tensor and of its views. It does not count writes past it: through ``.data``, NumPy or a
    custom kernel. A tensor that was made under ``torch.inference_mode`` has no counter.
    """

    tensor: Tensor
    edits: int

    @classmethod
    def of(cls, tensor: Tensor, edited: bool = False) -> TensorVersion:
        """Take `tensor` as it is now; `edited`: as a copy of one that was edited, which matches nothing."""
        return cls(tensor, _EDITED if edited else _count_edits(tensor))

    def matches(self, tensor: object) -> bool:
        """Return whether `tensor` is the same object, without an edit since."""
        return tensor is self.tensor and self.edits == _count_edits(self.tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorVersion.of, (self.tensor, not self.matches(self.tensor))  # a copy counts from another number


def _count_edits(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


NOT_ON_HOST: Final[Any] = None
"""`PackedBatch.seq_lengths`, `num_padding` and `parts` of a static batch: its documents change under Python code that
stays, so a length that is read once would be wrong from the next batch on; ``sum(None)`` raises instead."""


class Derived:
    """Objects derived from one batch.

    Not a container: FSDP and DDP's mixed precision rebuild dataclasses field by field, and dicts and lists inside as
    plain new ones (`torch.distributed.utils._apply_to_tensors`), which would cast masks and part the copy that the
    model sees from the batch that the trainer clears.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class PackedBatch(TensorFields):
    """The documents of one packed row.

    ``seq_lengths=(3, 2)`` -> ``cu_seqlens=[0, 3, 5]``, ``position_ids=[[0, 1, 2, 0, 1]]``, ``max_seqlen=3``.
    With ``num_padding=2`` the tail is one further segment and never a document: ``cu_seqlens=[0, 3, 5, 7]``,
    ``position_ids=[[0, 1, 2, 0, 1, 0, 1]]``.

    A *static* batch (`static_batch.py`) has tensors whose shapes say nothing about its documents; the host knows
    nothing of them.

    The object travels as the keyword ``packed_batch`` of ``model.forward``. It has ``.to`` and ``.pin_memory``, so
    that data loaders, accelerate and checkpointing carry it like a tensor.

    Attributes:
        seq_lengths: tokens of each document, on the host. Stays with the batch; never a layer argument.
        num_padding: tokens of the tail, the last segment of `cu_seqlens`. No loss counts them.
        cu_seqlens: (num_segments + 1,) int32, in tokens; ends at the length of the row.
        position_ids: (1, total_tokens) int64, starting at 0 in each segment; after the prefix where there is one.
        positions: the same as they were made; None where a batch of plain tensors was moved one by one.
        seq_idx: (1, total_tokens) int32, the segment of each token.
        max_seqlen: tokens of the longest segment, a host int.
        loss_positions: (num_loss_tokens,) int64, the flat positions whose *next* token is counted by the loss.
        loss_labels: (num_loss_tokens,) int64, those next tokens.
        labels: the labels that these two were made from; None where that is not known.
        parts: the micro-batches that `merge_batches` made the row of, first to last; empty for a row by itself.
        shared: the keys of segments that continue tokens of another one; None: no segment does.
        blocks: the images whose tokens attend to each other; None: each token sees those up to itself.
        documents: of a row that the collator made of documents with shared prefixes, to which `labels` belong; None:
            they are the segments, one label per token.
        derived: objects built once from the batch (`derive`), shared by copies that are rebuilt field by field.
    """

    seq_lengths: tuple[int, ...]
    cu_seqlens: Tensor
    position_ids: Tensor
    seq_idx: Tensor
    max_seqlen: int
    num_padding: int = 0
    loss_positions: Tensor | None = None
    loss_labels: Tensor | None = None
    labels: TensorVersion | None = None
    positions: TensorVersion | None = None
    parts: tuple[Part, ...] = ()
    shared: SharedKeys | None = None
    blocks: Blocks | None = None
    documents: Documents | None = None
    derived: Derived = field(default_factory=Derived, repr=False)

    @classmethod
    def from_lengths(
        cls, seq_lengths: Sequence[int] | Ints, *, num_padding: int = 0, labels: Tensor | None = None,
        prefixes: tuple[Ints, Ints] | None = None, width: int = 0,
    ) -> PackedBatch:  # fmt: skip
        """Build the metadata of a row on the host.

        Args:
            seq_lengths: tokens of each document, or of each segment of a row that shares; each at least 1.
            num_padding: tokens appended after the last document.
            labels: (total_tokens,) or (1, total_tokens) int64 on the host, `IGNORE_INDEX` where no loss is counted.
                First tokens of a document are never counted: nothing precedes them.
            prefixes: of a row that shares: `SharedKeys.prefix_lengths` and `key_index` without the padded tail.
            width: tokens of the padded rows that it stands for, whose last position the end of the tail gets.

        Raises:
            ValueError: no document, a length below 1, or labels of another length than the row.
        """
        lengths: Ints = np.asarray(seq_lengths, dtype=np.int64)
        if not lengths.size:
            raise ValueError("seq_lengths is empty: a packed batch needs at least one document")
        if lengths.min() < 1:
            raise ValueError(f"seq_lengths has a document of length {lengths.min()}: drop empty documents first")
        if num_padding < 0:
            raise ValueError(f"num_padding={num_padding} is negative: it counts the tokens after the last document")
        segments = np.append(lengths, num_padding) if num_padding else lengths
        ends = segments.cumsum()
        total = int(ends[-1])
        # A running sum that falls back to 0 where a segment starts.
        places: Ints = np.ones(total, np.int64)
        places[0] = 0
        places[ends[:-1]] = 1 - segments[:-1]
        places.cumsum(out=places)
        loss_positions = loss_labels = None
        if labels is not None:
            flat = labels.numpy().reshape(-1)
            if flat.size != total:
                raise ValueError(f"labels has {flat.size} tokens, the row has {total}: one label per token")
            counted = (flat[1:] != IGNORE_INDEX) & (places[1:] != 0)
            counted[total - num_padding - 1 :] = False
            predicting = counted.nonzero()[0]
            loss_positions, loss_labels = torch.from_numpy(predicting), torch.from_numpy(flat[1:][predicting])
        shared = None
        if prefixes is not None and prefixes[0].any():
            before: Ints = np.append(prefixes[0], np.zeros(len(segments) - len(lengths), np.int64))
            index: Ints = np.append(prefixes[1], np.arange(total - num_padding, total))
            keys = segments + before
            ends_k = torch.from_numpy(np.append(0, keys.cumsum()).astype(np.int32))
            shared = SharedKeys(tuple(before.tolist()), torch.from_numpy(index), ends_k, int(keys.max()))
            places += before.repeat(segments)
        if num_padding:  # below the end of the longest document, by which some models rotate
            places[-num_padding:] %= places[:-num_padding].max() + 1
            places[-1] = max(places[-1], width - 1)
        # Neither `places[None]`, whose first stride is 0, nor a view: torch may compile layers again for either.
        position_ids = torch.from_numpy(places.reshape(1, total))
        return cls(
            seq_lengths=tuple(lengths.tolist()), num_padding=num_padding, max_seqlen=int(segments.max()),
            cu_seqlens=torch.from_numpy(np.append(0, ends).astype(np.int32)), position_ids=position_ids,
            seq_idx=torch.from_numpy(np.arange(len(segments), dtype=np.int32).repeat(segments).reshape(1, total)),
            loss_positions=loss_positions, loss_labels=loss_labels, shared=shared,
            labels=TensorVersion.of(labels) if labels is not None else None, positions=TensorVersion.of(position_ids),
        )  # fmt: skip

    @property
    def total_tokens(self) -> int:
        """Tokens of the row, the padded tail included."""
        return self.position_ids.shape[1]

    @property
    def is_static(self) -> bool:
        """Return whether its tensors get other documents while it stays; the host does not know them then."""
        return self.seq_lengths is NOT_ON_HOST

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment of `cu_seqlens`: the documents, then the tail if there is one."""
        return (*self.seq_lengths, self.num_padding) if self.num_padding else self.seq_lengths

    @property
    def bucketed_max_seqlen(self) -> int:
        """`rounded_length` of `max_seqlen`; that of a static batch is its bucket's already.

        What crosses a layer boundary: a compiled layer sees few values, and a kernel that sizes its grid by it launches
        at most a quarter of its blocks in vain.
        """
        return self.max_seqlen if self.is_static else rounded_length(self.max_seqlen)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    def counts(self, labels: object) -> bool:
        """Return whether `loss_positions` belong to `labels`: the tensor they were made from, unedited since."""
        return self.loss_positions is not None and self.labels is not None and self.labels.matches(labels)

    def describes(self, row: Tensor, position_ids: object) -> bool:
        """Return whether a row of tokens or embeddings has these documents, by its shape and its position ids."""
        fits = tuple(row.shape[:2]) == (1, self.total_tokens)
        return fits and (self.positions is None or self.positions.matches(position_ids))

    def derive(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result of `build`, which runs at most once per batch and key.

        Masks and per-backend metadata live here, with the batch they were made from, and nowhere else.
        """
        if key not in self.derived.values:
            self.derived.values[key] = build()
        value: T = self.derived.values[key]
        return value

    def clear_derived(self) -> None:
        """Drop everything derived. The trainer does so after each step: it keeps all micro-batches of an accumulation
        alive, and masks hung on them would add up."""
        self.derived.values.clear()

    def map(self, convert: Callable[[Tensor], Tensor]) -> PackedBatch:
        """Return a copy with converted tensors and without derived objects."""
        moved = TensorFields.map(self, convert)
        labels, positions = self.labels, self.positions
        if moved.position_ids is not self.position_ids:
            # The mapping around this batch is moved by itself, so no tensor of it is known here.
            edited = positions is not None and not positions.matches(self.position_ids)
            labels, positions = None, TensorVersion.of(moved.position_ids, edited=True) if edited else None
        return replace(moved, labels=labels, positions=positions, derived=Derived())


def rounded_length(tokens: int) -> int:
    """Round up to one of four steps per power of two, from 128 on; a rounded length stays as it is."""
    return rounded_up(tokens, 4, 128)


def rounded_up(value: int, steps: int, least: int) -> int:
    """Round up to one of `steps` per power of two (itself one), at least `least` apart."""
    step = max(least, (1 << (value - 1).bit_length()) // (2 * steps))
    return -(-value // step) * step


def merge_batches(batches: Sequence[PackedBatch], labels: Tensor | None = None) -> PackedBatch:
    """Join several rows into one, on their device; documents stay documents, padding is dropped.

    ``seq_lengths`` (3, 2) and (4,) -> (3, 2, 4), ``cu_seqlens=[0, 3, 5, 9]``. Shared prefixes stay shared.
    The host knows all offsets, so merging never synchronizes. `labels` are those of the row, in the same order.

    Raises:
        ValueError: no batch, or one without `loss_positions`.
    """
    if not batches or any(batch.loss_positions is None for batch in batches):
        raise ValueError("merge_batches needs one batch or more, each with loss_positions: give the collator labels")
    shares, has_documents = any(row.shared for row in batches), any(row.documents for row in batches)
    tensors, of_keys, of_documents = (defaultdict[str, list[Tensor]](list) for _ in range(3))
    lengths, prefixes, parts, wholes = list[int](), list[int](), list[Part](), list[Documents]()
    keys = 0
    for row in batches:
        start, first, tokens, count = sum(lengths), len(lengths), sum(row.seq_lengths), len(row.seq_lengths)
        segments = slice(1 if lengths else 0, count + 1)  # each bound once: a row starts where the one before it ends
        assert row.loss_positions is not None
        assert row.loss_labels is not None
        tensors["cu_seqlens"].append(row.cu_seqlens[segments] + start)
        tensors["position_ids"].append(row.position_ids[:, :tokens])
        tensors["seq_idx"].append(row.seq_idx[:, :tokens] + first)
        tensors["loss_positions"].append(row.loss_positions + start)
        tensors["loss_labels"].append(row.loss_labels)
        if shares:
            own = row.shared or SharedKeys.own(row.cu_seqlens, row.segment_lengths)
            index = own.key_index[: own.key_index.numel() - row.num_padding]
            of_keys["key_index"].append(index + start)
            of_keys["cu_seqlens_k"].append(own.cu_seqlens_k[segments] + keys)
            prefixes += own.prefix_lengths[:count]
            keys += index.numel()
        if has_documents:
            whole = row.documents or Documents.own(row.seq_lengths, row.loss_positions, row.total_tokens)
            of_documents["token_of"].append(whole.token_of + start)
            of_documents["loss_weights"].append(whole.loss_weights)
            of_documents["copies"].append(whole.copies[:tokens])
            wholes.append(whole)
        given = row.documents
        capacity, counted = (given.capacity, given.loss_tokens) if given else (row.total_tokens, 0)
        parts.append(Part(tokens, capacity, row.loss_positions.numel(), counted))
        lengths += row.seq_lengths
    joined, documents = _joined(tensors), None
    longest = max(map(sum, zip(prefixes, lengths, strict=False)), default=0)  # in keys, of the segments that are left
    if wholes:
        documents = Documents(
            lengths=tuple(length for whole in wholes for length in whole.lengths),
            parts=tuple(sum(whole.lengths) for whole in wholes), loss_tokens=sum(whole.loss_tokens for whole in wholes),
            capacity=sum(whole.capacity for whole in wholes), **_joined(of_documents),
        )  # fmt: skip
    return PackedBatch(
        seq_lengths=tuple(lengths), max_seqlen=max(lengths), parts=tuple(parts), documents=documents,
        labels=TensorVersion.of(labels) if labels is not None else None,
        positions=TensorVersion.of(joined["position_ids"]),
        shared=SharedKeys(tuple(prefixes), max_seqlen_k=longest, **_joined(of_keys)) if shares else None, **joined,
    )  # fmt: skip


def _joined(pieces: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat(tensors, dim=-1) for name, tensors in pieces.items()}


def to_transformers_kwargs(batch: PackedBatch) -> dict[str, Any]:
    """Return the keywords of transformers' models for packed metadata; the only place with their spelling.

    `cu_seq_lens_*` and `max_length_*` are read by its flash attention, `seq_idx` by its short convolutions.
    """
    return {
        "position_ids": batch.position_ids, "cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen, "seq_idx": batch.seq_idx,
    }  # fmt: skip
