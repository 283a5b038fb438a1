"""`PackedBatch`: the metadata of a packed row, built once per batch, on the host, then only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from fastpack_trl.errors import PackingError
from fastpack_trl.packing.as_made import AsMade
from fastpack_trl.packing.shared_keys import Documents, SharedKeys, merge_documents, merge_keys

IGNORE_INDEX = -100
"""Label of a token that no loss counts (the convention of torch's and transformers' losses)."""

T = TypeVar("T")


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


class NotOnHost:
    """Stands for a value that a static batch does not have on the host: every use of it raises.

    The tensors of a static batch get other documents while all Python around them stays, so that a length that was
    read once would be wrong from the next batch on.
    """

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise PackingError(
            "a static batch was asked for its documents on the host, which change under it: read them from the plain "
            "batch that was copied into it"
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "NOT_ON_HOST"

    def __reduce__(self) -> str:
        return "NOT_ON_HOST"


NOT_ON_HOST: Final[Any] = NotOnHost()
"""`PackedBatch.seq_lengths`, `num_padding` and `parts` of a static batch."""


class Derived:
    """Objects derived from one batch.

    Not a container: FSDP and DDP's mixed precision rebuild dataclasses field by field, and dicts and lists inside as
    plain new ones (`torch.distributed.utils._apply_to_tensors`), which would cast masks and part the copy that the
    model sees from the batch that the trainer clears.
    """

    __slots__ = ("counts", "values")

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self.counts: Counter[Hashable] = Counter()


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class PackedBatch:
    """The documents of one packed row.

    ``seq_lengths=(3, 2)`` -> ``cu_seqlens=[0, 3, 5]``, ``position_ids=[[0, 1, 2, 0, 1]]``, ``max_seqlen=3``.
    With ``num_padding=2`` the tail is one further segment and never a document: ``cu_seqlens=[0, 3, 5, 7]``,
    ``position_ids=[[0, 1, 2, 0, 1, 0, 1]]``.

    A *static* batch (`static_batch.py`) has tensors whose shapes say nothing about its documents, and two tensors
    more in place of what the host knows of a plain one.

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
        loss_mask: (num_loss_tokens,) bool, the entries of `loss_positions` that count; None: all of them do.
        part_bounds: (num_parts + 1,) int32, in tokens: micro-batch ``i`` of a static batch is
            ``part_bounds[i] <= token < part_bounds[i + 1]``, the tail follows the last. None in a plain batch.
        shared: the keys of segments that go on from tokens of another one; None: no segment does.
        documents: of a row that the collator made of documents with shared prefixes, to which `labels` belong; None:
            they are the segments, one label per token.
        derived: what was built of the batch once (`derive`), shared by copies that are rebuilt field by field.
    """

    seq_lengths: tuple[int, ...]
    cu_seqlens: Tensor
    position_ids: Tensor
    seq_idx: Tensor
    max_seqlen: int
    num_padding: int = 0
    loss_positions: Tensor | None = None
    loss_labels: Tensor | None = None
    labels: AsMade | None = None
    positions: AsMade | None = None
    parts: tuple[Part, ...] = ()
    loss_mask: Tensor | None = None
    part_bounds: Tensor | None = None
    shared: SharedKeys | None = None
    documents: Documents | None = None
    derived: Derived = field(default_factory=Derived, repr=False)

    @classmethod
    def from_lengths(
        cls, seq_lengths: Sequence[int], *, num_padding: int = 0, labels: Tensor | None = None
    ) -> PackedBatch:
        """Build the metadata from host lengths, in plain torch: the reference for the collator's own construction.

        Args:
            seq_lengths: tokens of each document; each at least 1.
            num_padding: tokens appended after the last document.
            labels: (total_tokens,) or (1, total_tokens) int64 on the host, `IGNORE_INDEX` where no loss is counted.
                First tokens of a document are never counted: nothing precedes them.

        Raises:
            ValueError: no document, a length below 1, or labels of another length than the row.
        """
        lengths = tuple(int(length) for length in seq_lengths)
        if not lengths:
            raise ValueError("seq_lengths is empty: a packed batch needs at least one document")
        if min(lengths) < 1:
            raise ValueError(f"seq_lengths has a document of length {min(lengths)}: drop empty documents first")
        if num_padding < 0:
            raise ValueError(f"num_padding={num_padding} is negative: it counts the tokens after the last document")
        segments = torch.tensor([*lengths, num_padding] if num_padding else lengths)
        cu_seqlens = torch.zeros(len(segments) + 1, dtype=torch.int32)
        torch.cumsum(segments, 0, out=cu_seqlens[1:])
        total = int(segments.sum())
        position_ids = (torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1].long(), segments))[None]
        positions = loss_labels = None
        if labels is not None:
            flat = labels.reshape(-1)
            if flat.numel() != total:
                raise ValueError(f"labels has {flat.numel()} tokens, the row has {total}: one label per token")
            counted = flat[1:].ne(IGNORE_INDEX) & position_ids[0, 1:].ne(0)
            counted[total - num_padding - 1 :] = False
            positions = counted.nonzero().squeeze(1)
            loss_labels = flat[1:][counted]
        return cls(
            seq_lengths=lengths,
            num_padding=num_padding,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            seq_idx=torch.repeat_interleave(torch.arange(len(segments), dtype=torch.int32), segments)[None],
            max_seqlen=int(segments.max()),
            loss_positions=positions,
            loss_labels=loss_labels,
            labels=AsMade.of(labels) if labels is not None else None,
            positions=AsMade.of(position_ids),
        )

    @property
    def total_tokens(self) -> int:
        """Tokens of the row, the padded tail included."""
        return self.position_ids.shape[1]

    @property
    def is_static(self) -> bool:
        """Return whether its tensors get other documents while it stays; the host does not know them then."""
        return self.part_bounds is not None

    @property
    def shares(self) -> bool:
        """Return whether tokens lie in the row once for several documents; of equal ones alone without `shared`."""
        return self.shared is not None or self.documents is not None

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

    def has_copy_of_labels(self, labels: Tensor) -> bool:
        """Return whether `labels` are another tensor than `loss_positions` were made from, with its values; syncs."""
        made = self.labels
        if made is None or labels is made.tensor or not made.matches(made.tensor):
            return False
        return made.tensor.device == labels.device and torch.equal(made.tensor, labels)

    def describes(self, row: Tensor, position_ids: object) -> bool:
        """Return whether a row of tokens or embeddings has these documents, by its shape and its position ids."""
        fits = tuple(row.shape[:2]) == (1, self.total_tokens)
        return fits and (self.positions is None or self.positions.matches(position_ids))

    @property
    def build_counts(self) -> Counter[Hashable]:
        """Builds of each derived object; survives `clear_derived`, to be read after a step."""
        return self.derived.counts

    def derive(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what `build` makes, made at most once per batch and key.

        Masks and per-backend metadata live here, with the batch they were made from, and nowhere else.
        """
        derived = self.derived
        if key not in derived.values:
            derived.values[key] = build()
            derived.counts[key] += 1
        value: T = derived.values[key]
        return value

    def clear_derived(self) -> None:
        """Drop everything derived. The trainer does so after each step: it keeps all micro-batches of an accumulation
        alive, and masks hung on them would add up."""
        self.derived.values.clear()

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """Copy to `device`; what was derived stays behind. The copy is asynchronous where the tensors are pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking or tensor.is_pinned()))

    def pin_memory(self) -> PackedBatch:
        """Copy to page-locked host memory; called by `torch.utils.data.DataLoader`."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, convert: Callable[[Tensor], Tensor]) -> PackedBatch:
        tensors = ("cu_seqlens", "position_ids", "seq_idx", "loss_positions", "loss_labels", "loss_mask", "part_bounds")
        converted = {name: convert(value) for name in tensors if (value := getattr(self, name)) is not None}
        labels, positions = self.labels, self.positions
        if converted["position_ids"] is not self.position_ids:
            # What the mapping around this batch holds is moved apart: no tensor of it is known here.
            edited = positions is not None and not positions.matches(self.position_ids)
            labels, positions = None, AsMade.of(converted["position_ids"], edited=True) if edited else None
        moved = {name: part and part.map(convert) for name in ("shared", "documents") if (part := getattr(self, name))}
        return replace(self, **converted, **moved, labels=labels, positions=positions, derived=Derived())


def rounded_length(tokens: int) -> int:
    """Round up to one of four steps per power of two, from 128 on; a rounded length stays as it is."""
    step = max(128, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def merge_batches(batches: Sequence[PackedBatch], labels: Tensor | None = None) -> PackedBatch:
    """Join several rows into one, on their device; documents stay documents, padding is dropped.

    ``seq_lengths`` (3, 2) and (4,) -> (3, 2, 4), ``cu_seqlens=[0, 3, 5, 9]``. Shared prefixes stay shared.
    All offsets are known on the host, so that the device is not asked.

    Args:
        batches: each with `loss_positions`.
        labels: those of the row, in the same order.

    Raises:
        ValueError: no batch, or one without `loss_positions`.
    """
    if not batches or any(batch.loss_positions is None for batch in batches):
        raise ValueError("merge_batches needs one batch or more, each with loss_positions: give the collator labels")
    first = batches[0]
    tensors: dict[str, list[Tensor]] = {
        "cu_seqlens": [first.cu_seqlens[:1]], "position_ids": [], "seq_idx": [], "loss_positions": [], "loss_labels": []
    }  # fmt: skip
    lengths: list[int] = []
    parts = []
    for batch in batches:
        start, documents, tokens = sum(lengths), len(batch.seq_lengths), sum(batch.seq_lengths)
        assert batch.loss_positions is not None
        assert batch.loss_labels is not None
        tensors["cu_seqlens"].append(batch.cu_seqlens[1 : documents + 1] + start)
        tensors["position_ids"].append(batch.position_ids[:, :tokens])
        tensors["seq_idx"].append(batch.seq_idx[:, :tokens] + len(lengths))
        tensors["loss_positions"].append(batch.loss_positions + start)
        tensors["loss_labels"].append(batch.loss_labels)
        whole, count = batch.documents, batch.loss_positions.numel()
        capacity, counted = (batch.total_tokens, 0) if whole is None else (whole.capacity, whole.loss_tokens)
        parts.append(Part(tokens, capacity, count, counted))
        lengths += batch.seq_lengths
    merged = {name: torch.cat(pieces, dim=-1) for name, pieces in tensors.items()}
    return PackedBatch(
        seq_lengths=tuple(lengths),
        max_seqlen=max(lengths),
        labels=AsMade.of(labels) if labels is not None else None,
        positions=AsMade.of(merged["position_ids"]),
        parts=tuple(parts),
        shared=_merged_keys(batches),
        documents=_merged_documents(batches),
        **merged,
    )


def _merged_keys(batches: Sequence[PackedBatch]) -> SharedKeys | None:
    if all(batch.shared is None for batch in batches):
        return None
    rows = [batch.shared or SharedKeys.own(batch.cu_seqlens, batch.segment_lengths) for batch in batches]
    return merge_keys(
        [keys.without_tail(batch.num_padding) for keys, batch in zip(rows, batches, strict=True)],
        [sum(batch.seq_lengths) for batch in batches],
    )


def _merged_documents(batches: Sequence[PackedBatch]) -> Documents | None:
    if all(batch.documents is None for batch in batches):
        return None
    whole = [
        batch.documents or Documents.own(batch.seq_lengths, batch.loss_positions, batch.total_tokens)
        for batch in batches
    ]
    return merge_documents(whole, [sum(batch.seq_lengths) for batch in batches])


def to_transformers_kwargs(batch: PackedBatch) -> dict[str, Any]:
    """Return the keywords of transformers' models for packed metadata; the only place with their spelling.

    `cu_seq_lens_*` and `max_length_*` are read by its flash attention, `seq_idx` by its short convolutions.
    """
    return {
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "seq_idx": batch.seq_idx,
    }
