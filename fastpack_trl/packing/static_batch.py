"""The static form of a packed row: tensors of shapes that depend on its bucket only, filled in place batch after batch.

A CUDA graph replays the work of the device and reads the same tensors. So everything that changes from row to row must
be in them: the row is filled up by a tail without documents, `cu_seqlens` by segments of length 0, the keys of shared
prefixes and the images whose tokens attend to each other by more of them for the tail, whose gradients are zero. What
the host knows of a plain batch is None in its static form: code that computes with it raises instead of going on with
the lengths of another batch.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import NOT_ON_HOST, PackedBatch, to_transformers_kwargs
from fastpack_trl.packing.shared_keys import SharedKeys


class Form(NamedTuple):
    """How a row reaches a decoder: as ids, or as embeddings, of which a tower may have made a part."""

    width: tuple[int, ...] = ()
    """(hidden,) of embeddings."""
    dtype: torch.dtype = torch.int64
    trains: bool = False
    """Embeddings need a gradient."""
    sections: int = 0
    """Of positions; 0: they are those of the documents."""

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor | None = None) -> Form:
        """Return the form of a row: (1, total_tokens) ids, or (1, total_tokens, hidden) embeddings.

        `positions` are (1, total_tokens), or (sections, 1, total_tokens).
        """
        sections = 0 if positions is None or positions.dim() < 3 else len(positions)
        return cls(tuple(tokens.shape[2:]), tokens.dtype, tokens.requires_grad, sections)


IDS = Form()


class StaticInputs:
    """The keywords of a backbone for any row that fits into a bucket; always the same tensors.

    The tail has the tokens of its row once more, which go to as many experts as they do, and not those of rows before,
    on which rounding would depend. Each segment of it is at most `Bucket.max_seqlen` long. Its position ids are below
    those of the row's longest document, so that no table of positions meets a larger one.

    Attributes:
        bucket: the shapes.
        keywords: ``input_ids``, those of `to_transformers_kwargs`, and ``packed_batch``; with embeddings, as a decoder
            gets them from its model, ``inputs_embeds``, ``position_ids`` and ``packed_batch``.
        batch: the `PackedBatch` in them.
        tokens: ids, or embeddings, then a leaf if they need a gradient.
    """

    def __init__(self, bucket: Bucket, device: torch.device | str, form: Form = IDS) -> None:
        self.bucket = bucket
        row, segments = (1, bucket.tokens), bucket.segments + 1
        # A tail without documents until a row is copied in, because a recording needs a valid row.
        ends = (torch.arange(segments, device=device) * bucket.max_seqlen).clamp_(max=bucket.tokens).int()
        shared = None
        if bucket.keys:
            index = torch.zeros(bucket.keys, dtype=torch.int64, device=device)
            shared = SharedKeys(NOT_ON_HOST, index, ends.clone(), bucket.max_seqlen_k)
        blocks = _images(bucket, device) if bucket.images else None
        self.batch = PackedBatch(
            seq_lengths=NOT_ON_HOST, num_padding=NOT_ON_HOST, parts=NOT_ON_HOST, max_seqlen=bucket.max_seqlen,
            cu_seqlens=ends, position_ids=torch.zeros(row, dtype=torch.int64, device=device),
            seq_idx=torch.zeros(row, dtype=torch.int32, device=device), shared=shared, blocks=blocks,
        )  # fmt: skip
        shape = (*row, *form.width)
        self.tokens = torch.zeros(shape, dtype=form.dtype, device=device, requires_grad=form.trains)
        self.keywords: dict[str, Any] = {
            "input_ids": self.tokens, **to_transformers_kwargs(self.batch), "packed_batch": self.batch,
        }  # fmt: skip
        self._sections = torch.zeros((form.sections, *row), dtype=torch.int64, device=device)
        if form.width:
            positions = self._sections if form.sections else self.batch.position_ids
            self.keywords = {"inputs_embeds": self.tokens, "position_ids": positions, "packed_batch": self.batch}

    def copy_row(self, batch: PackedBatch, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Take in a row, without waiting for the device; return its tokens with the tail, with their autograd graph.

        One copy from pinned memory, of the ends of the segments; the rest is made on the device, on the current stream.
        Earlier and later readers of the tensors must run on that stream too. `tokens` and `positions` are as in `Form`,
        and `batch` is on the same device.
        """
        size, static = Bucket.of(batch), self.batch
        assert self.bucket.holds(size), f"a row of {size} does not fit into {self.bucket}"
        ends = self._on_device(_ends(self.bucket, size, batch))
        row = torch.arange(self.bucket.tokens, dtype=torch.int32, device=self.tokens.device)
        segment = torch.bucketize(row, ends[0, 1:], right=True, out_int32=True)
        places = row - ends[0].index_select(0, segment)
        static.cu_seqlens.copy_(ends[0])
        static.seq_idx.copy_(segment)
        again = row % size.tokens
        filled = tokens.index_select(1, again)
        self.tokens.detach().copy_(filled.detach())
        if len(self._sections):
            assert positions is not None
            self._sections.copy_(positions.index_select(-1, again))
        if static.shared is not None:
            before = ends.diff()  # keys of each segment less its tokens lie before them
            before = before[1] - before[0]
            places = places + before.index_select(0, segment)
            static.shared.cu_seqlens_k.copy_(ends[1])
            static.shared.key_index.copy_(_key_index(ends, before, self.bucket.keys, size.tokens))
            if batch.shared is not None:
                static.shared.key_index[: size.keys].copy_(batch.shared.key_index)
        if static.blocks is not None:
            self._copy_images(static.blocks, batch.blocks, size)
        keys = zip(batch.seq_lengths, batch.shared.prefix_lengths if batch.shared else repeat(0), strict=False)
        static.position_ids.copy_(places % max(map(sum, keys)))
        return filled

    def _on_device(self, ends: NDArray[np.int32]) -> Tensor:
        # New each time: torch keeps pinned memory from reuse until the copy out of it is done.
        made = torch.from_numpy(ends)
        made = made.pin_memory() if self.tokens.is_cuda else made
        return made.to(self.tokens.device, non_blocking=True)

    def _copy_images(self, static: Blocks, given: Blocks | None, size: Bucket) -> None:
        """Take in the images of a row, and as further ones tokens of the tail."""
        bucket, pieces = self.bucket, self.bucket.image_pieces_of(size)
        lengths = np.array(given.lengths if given else (), np.int64).reshape(-1, 2).T
        totals = bucket.image_tokens, bucket.image_keys
        ends = [_filled(*pair, pieces, bucket.images + 1) for pair in zip(lengths, totals, strict=True)]
        for cu, made in zip((static.cu_seqlens, static.cu_seqlens_k), self._on_device(np.stack(ends)), strict=True):
            cu.copy_(made)
        tail = bucket.tokens - size.tokens
        for name in ("tokens", "key_index"):
            index: Tensor = getattr(static, name)
            index.copy_(size.tokens + torch.arange(len(index), device=index.device) % max(1, tail))
            if given is not None:
                own: Tensor = getattr(given, name)
                index[: len(own)].copy_(own)


def _images(bucket: Bucket, device: torch.device | str) -> Blocks:
    """Return images without tokens, until a row is copied in."""
    tokens, keys = (torch.zeros(count, dtype=torch.int64, device=device) for count in bucket[-2:])
    ends = torch.arange(bucket.images + 1, device=device)
    cu, cu_k = ((ends * bucket.max_seqlen).clamp(max=count).int() for count in bucket[-2:])
    return Blocks(NOT_ON_HOST, tokens, keys, cu, cu_k, NOT_ON_HOST, (bucket.max_seqlen, bucket.max_seqlen))


def _ends(bucket: Bucket, size: Bucket, batch: PackedBatch) -> NDArray[np.int32]:
    """Return `cu_seqlens` of a row and its tail, (1, segments + 1); with keys two rows, `cu_seqlens_k` second."""
    pieces, entries = bucket.pieces_of(size), bucket.segments + 1
    lengths = np.array(batch.segment_lengths)
    found = [_filled(lengths, bucket.tokens, pieces, entries)]
    if bucket.keys:
        keys = lengths if batch.shared is None else lengths + np.array(batch.shared.prefix_lengths)
        found.append(_filled(keys, bucket.keys, pieces, entries))
    return np.stack(found)


def _filled(lengths: NDArray[np.int64], total: int, pieces: int, entries: int) -> NDArray[np.int32]:
    """Return (entries,) ends of segments of these lengths and of so many `pieces` up to `total`, then empty ones."""
    whole, rest = divmod(total - lengths.sum(), max(1, pieces))
    lengths = np.concatenate([lengths, whole + (np.arange(pieces) < rest)])  # pieces of about the same length
    found: NDArray[np.int32] = np.full(entries, total, np.int32)
    found[: len(lengths) + 1] = np.append(0, lengths.cumsum())
    return found


def _key_index(ends: Tensor, before: Tensor, count: int, tokens: int) -> Tensor:
    """Return (count,) int64: the own tokens of each segment as its last keys; those before them spread over the row.

    `ends` are (2, segments + 1) int32, in tokens and in keys; `before`, (segments,), keys that are not own tokens.
    """
    place = torch.arange(count, dtype=torch.int32, device=ends.device)
    segment = torch.bucketize(place, ends[1, 1:], right=True, out_int32=True)
    own = place - (ends[1, :-1] + before).index_select(0, segment)
    return torch.where(own >= 0, ends[0].index_select(0, segment) + own, place % tokens).long()
