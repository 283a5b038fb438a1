"""`PackedInputs`: a batch whose tensors lie in one block of memory, so that one copy brings it to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch, TensorVersion, to_transformers_kwargs
from fastpack_trl.packing.shared_keys import Documents, SharedKeys

ALIGNMENT = 128
"""Bytes to which each section of the block is aligned: a cache line of a GPU, a multiple of every element size."""

_DTYPES = {
    "cu_seqlens": torch.int32, "seq_idx": torch.int32, "part_bounds": torch.int32, "loss_mask": torch.bool,
    "cu_seqlens_k": torch.int32, "loss_weights": torch.float32, "copies": torch.float32,
}  # fmt: skip
"""Of the sections that are not int64."""
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_, torch.float32: np.float32}

SHARED: dict[str, tuple[str, ...]] = {
    "shared": ("key_index", "cu_seqlens_k"),
    "documents": ("token_of", "loss_weights", "copies"),
}
"""Sections of parts of a `PackedBatch` that have tensors of their own."""

WATCHED = {"labels": "labels", "position_ids": "positions"}
"""Tensors from which others were made: the section, and where `PackedBatch` keeps it as it was."""

NOTHING = torch.empty(0, dtype=torch.int64)
"""In the place of a tensor that is a section of a block."""

IntArray = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


class Section(NamedTuple):
    """Place of one tensor in a block: ``Section("labels", torch.int64, 8208, (1, 8192))``."""

    name: str
    dtype: torch.dtype
    start: int
    """In elements of `dtype`."""
    shape: tuple[int, ...]


def lay_out(tensors: Mapping[str, tuple[int, ...]]) -> tuple[tuple[Section, ...], int]:
    """Return places for tensors of these shapes one after the other, and the int64 elements that they take together."""
    sections, size = [], 0  # in units of alignment
    for name, shape in tensors.items():
        dtype = _DTYPES.get(name, torch.int64)
        unit = ALIGNMENT // dtype.itemsize
        sections.append(Section(name, dtype, size * unit, shape))
        # At least one unit between two sections. Without it the second of two sections starts, in elements, where the
        # first is long: torch.compile takes offset and length for one symbol, guards on that, and compiles again for
        # the first row that is not a multiple of the alignment.
        size += shape[-1] // unit + 2
    return tuple(sections), size * (ALIGNMENT // 8)


def tensors_over(buffer: Tensor, sections: Iterable[Section]) -> dict[str, Tensor]:
    """Return the tensors of `sections` over a buffer of int64, at the start of its storage."""
    typed = {dtype: buffer.view(dtype) for dtype in {section.dtype for section in sections}}
    # One call per tensor: slice, view and reshape cost as much each, and calls into torch are most of this time.
    return {
        name: typed[dtype].as_strided(shape, (shape[-1], 1)[-len(shape) :], start)
        for name, dtype, start, shape in sections
    }


def arrays_over(buffer: Tensor, sections: Iterable[Section]) -> dict[str, NDArray[Any]]:
    """Return the same of a buffer on the host as flat arrays, through which to fill it."""
    array = buffer.numpy()
    return {name: array.view(_NUMPY[dtype])[start : start + shape[-1]] for name, dtype, start, shape in sections}


def write_segments(arrays: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]) -> None:
    """Write ``position_ids``, ``seq_idx`` and the beginning of ``cu_seqlens`` for segments of these lengths."""
    ends = lengths.cumsum()
    # In place, as a running sum that falls back to 0 where a segment starts.
    position_ids = arrays["position_ids"]
    position_ids.fill(1)
    position_ids[0] = 0
    position_ids[ends[:-1]] = 1 - lengths[:-1]
    position_ids.cumsum(out=position_ids)
    arrays["seq_idx"][:] = np.arange(len(lengths), dtype=np.int32).repeat(lengths)
    arrays["cu_seqlens"][0] = 0
    arrays["cu_seqlens"][1 : len(lengths) + 1] = ends


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Bytes, and what is made of them without a copy.

    Attributes:
        buffer: (num_bytes / 8,) int64, contiguous, at the start of its storage.
        sections: where each tensor lies.
        seq_lengths, num_padding, max_seqlen: the host part of the `PackedBatch`.
        parted: its `SharedKeys` and `Documents`, whose tensors are sections; those of their own are not kept.
        edited: of `WATCHED`, what was edited in place in the block that this one was copied from.
        parts: the tensors by section name, and ``packed_batch``, made of the same tensors.
    """

    buffer: Tensor
    sections: tuple[Section, ...]
    seq_lengths: tuple[int, ...]
    num_padding: int
    max_seqlen: int
    parted: tuple[tuple[str, SharedKeys | Documents], ...] = ()
    edited: frozenset[str] = frozenset()
    parts: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        parts: dict[str, Any] = dict(tensors_over(self.buffer, self.sections))
        watched: dict[str, Any] = {}
        for name, kept in WATCHED.items():
            # The views of one buffer share one count of edits; this alias has its own.
            parts[name] = parts[name].data
            watched[kept] = TensorVersion.of(parts[name], edited=name in self.edited)
        # A compiled layer reads it, and its graph asks for a view's base and offset: merged and static rows have none,
        # and would need a graph of their own. (The collator puts it at the start of the block.)
        parts["cu_seqlens"] = parts["cu_seqlens"].data
        for kept, part in self.parted:
            watched[kept] = replace(part, **{name: parts.pop(name).data for name in SHARED[kept]})
        parts["packed_batch"] = PackedBatch(
            seq_lengths=self.seq_lengths,
            num_padding=self.num_padding,
            max_seqlen=self.max_seqlen,
            **{name: part for name, part in parts.items() if name not in ("input_ids", "labels")},
            **watched,
        )
        object.__setattr__(self, "parts", parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the buffer travels: a worker hands over one shared-memory segment, and the copy is one storage again.
        rest = (self.sections, self.seq_lengths, self.num_padding, self.max_seqlen, self.parted)
        return Block, (self.buffer, *rest, self._edited_by_now())

    def _edited_by_now(self) -> frozenset[str]:
        batch = self.parts["packed_batch"]
        return frozenset(name for name, kept in WATCHED.items() if not getattr(batch, kept).matches(self.parts[name]))

    def names(self) -> dict[int, str]:
        """Return identity -> name of each part. The block keeps its parts alive, so that no identity is used twice."""
        return {id(part): name for name, part in self.parts.items()}

    def over(self, buffer: Tensor) -> Block:
        """Return the same parts over another buffer of the same bytes."""
        return self if buffer is self.buffer else replace(self, buffer=buffer, edited=self._edited_by_now())


class PackedInputs(dict[str, Any]):
    """The keywords of ``model.forward`` for one packed row; a `dict` whose tensors are views of one block of memory.

    `to` and `pin_memory` copy that block once and re-create the tensors and the `PackedBatch` from it, so that a data
    loader, accelerate and transformers' `Trainer` make one copy per batch instead of one per tensor. Pickling (the
    workers of a data loader) and `copy.deepcopy` carry the block as well.

    It may be changed like any `dict`: a tensor put in later is copied by itself, a key removed or replaced stays so.
    ``PackedInputs(mapping)`` holds the values of `mapping` as they are, without a block.
    """

    _block: Block | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block = None
        batch, positions = self.get("packed_batch"), self.get("position_ids")
        if isinstance(batch, PackedBatch) and isinstance(positions, Tensor) and positions.device != batch.device:
            # `Trainer._prepare_input` builds `type(data)({...})` and moves tensors only: where accelerate has not
            # placed the batch before (XLA), the metadata has to follow here.
            self["packed_batch"] = batch.to(positions.device)

    @classmethod
    def empty(
        cls,
        tensors: Mapping[str, tuple[int, ...]],
        *,
        seq_lengths: tuple[int, ...],
        num_padding: int,
        max_seqlen: int,
        shared: SharedKeys | None = None,
        documents: Documents | None = None,
    ) -> tuple[PackedInputs, dict[str, NDArray[Any]]]:
        """Return a batch over one new block on the host, and the arrays through which to fill it.

        Args:
            tensors: the shapes of ``cu_seqlens``, first, of ``input_ids``, ``labels`` and the other tensors of
                `PackedBatch`, under its names.
            seq_lengths: tokens of each document.
            num_padding: tokens of the tail.
            max_seqlen: tokens of the longest segment.
            shared, documents: of a row with shared prefixes; their tensors are copied into the block.
        """
        given = {"shared": shared, "documents": documents}
        parted = {name: part for name, part in given.items() if part is not None}
        own = {name: getattr(part, name).numpy() for kept, part in parted.items() for name in SHARED[kept]}
        sections, size = lay_out({**tensors, **{name: array.shape for name, array in own.items()}})
        buffer = torch.empty(size, dtype=torch.int64)
        arrays = arrays_over(buffer, sections)
        for name, array in own.items():
            arrays[name][:] = array
        hosts = tuple((kept, part.map(lambda _: NOTHING)) for kept, part in parted.items())
        block = Block(buffer, sections, seq_lengths, num_padding, max_seqlen, hosts)
        parts = block.parts
        entries = {"input_ids": parts["input_ids"], "labels": parts["labels"]}
        batch = parts["packed_batch"]
        inputs = cls._over(block, entries | to_transformers_kwargs(batch) | {"packed_batch": batch})
        return inputs, arrays

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedInputs:
        """Copy to `device`: the block once, and whatever else the mapping holds by itself.

        From the host to CUDA the host does not wait for the copy, whatever `non_blocking` says: nobody writes to the
        block again, torch keeps pinned memory from reuse until the copy is done, and CUDA stages pageable memory before
        it returns. What is on `device` already is kept.
        """

        def copy_buffer(buffer: Tensor) -> Tensor:
            staged = buffer.device.type == "cpu" and torch.device(device).type in ("cpu", "cuda")
            return buffer.to(device, non_blocking=non_blocking or staged or buffer.is_pinned())

        return self._map(copy_buffer, lambda value: send_to_device(value, device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """Copy to page-locked host memory; called by `torch.utils.data.DataLoader`."""
        return self._map(
            lambda buffer: buffer.pin_memory(),
            lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value,
        )

    def copy(self) -> PackedInputs:
        """Return a shallow copy over the same block."""
        return self._map(lambda buffer: buffer, lambda value: value)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        entries = self._entries()
        return _restore, (self._block if _has_parts(entries) else None, entries)

    def _entries(self) -> list[_Entry]:
        names = self._block.names() if self._block is not None else {}
        return [(key, names.get(id(value)), None if id(value) in names else value) for key, value in self.items()]

    def _map(self, convert_buffer: Callable[[Tensor], Tensor], convert: Callable[[Any], Any]) -> PackedInputs:
        entries = [(key, name, value if name else convert(value)) for key, name, value in self._entries()]
        if self._block is None or not _has_parts(entries):
            return _restore(None, entries)
        return _restore(self._block.over(convert_buffer(self._block.buffer)), entries)

    @classmethod
    def _over(cls, block: Block | None, entries: Mapping[str, Any]) -> PackedInputs:
        inputs = cls(entries)
        inputs._block = block
        return inputs


_Entry = tuple[str, str | None, Any]
"""A key, and the name of a part of the block or any other value."""


def _has_parts(entries: list[_Entry]) -> bool:
    return any(name is not None for _, name, _ in entries)


def _restore(block: Block | None, entries: list[_Entry]) -> PackedInputs:
    parts = block.parts if block is not None else {}
    return PackedInputs._over(block, {key: value if name is None else parts[name] for key, name, value in entries})
