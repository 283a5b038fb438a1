"""`Chunks`: the masks of a packed row for recurrent layers, built once per batch on its device.

The row is cut into chunks of 64 tokens as it is: no document is aligned, no token is moved. A chunk is one masked
matmul; the state of the document at the end of a chunk is passed to the next. All masks are computed from
`PackedBatch.seq_idx` by operations of fixed shape, so it never synchronizes, and a static batch (which a CUDA graph
runs for other documents) can have it made again inside of its graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch

CHUNK = 64
"""Tokens of a chunk; results do not depend on it, so it need not be the size that a family uses."""
_NOBODY = -1  # the document of the tokens that fill up the last chunk


class Chunks(NamedTuple):
    """Masks of a packed row in chunks of `CHUNK` tokens: tensors and an int of few values cross a layer boundary.

    ``seq_lengths=(70, 58)``: two chunks. ``carry_in`` is false in the first and true for the first 6 tokens of the
    second; ``to_end`` is true in the first and false for these 6; ``causal[1, 5]`` is true for its first 6 tokens and
    ``causal[1, 6]`` for the token itself alone.

    Attributes:
        positions: (total_tokens,) int64, of each token in its document.
        causal: (chunks, CHUNK, CHUNK) bool, ``[n, i, j]``: token j is token i or before it, in the same document.
        sums: the same as float64: its product with logarithms of decays is their sum since a document began. A running
            sum would cross documents and cancel, but for rounding, which the packing check detects.
        carry_in: (chunks, CHUNK) bool, the token is of the document with which the chunk before ends.
        to_end: (chunks, CHUNK) bool, the token is of the document with which its own chunk ends.
        chain: (chunks, chunks) bool, ``[n, m]``: chunk m is before n and ends with the document that chunk n-1 ends
            with. Its state then reaches chunk n.
        longest: tokens of the longest document, or a few more: `PackedBatch.bucketed_max_seqlen`.
    """

    positions: Tensor
    causal: Tensor
    sums: Tensor
    carry_in: Tensor
    to_end: Tensor
    chain: Tensor
    longest: int

    @property
    def reach(self) -> int:
        """Chunks whose states a later one may need: all of its document's but the last; 70 tokens may lie in three."""
        return (self.longest - 2) // CHUNK + 1

    @property
    def total_tokens(self) -> int:
        """Tokens of the row."""
        return self.positions.shape[0]

    def split(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (total_tokens, heads, ...) as (chunks, heads, CHUNK, ...), zeros after the row, a copy."""
        missing = self.causal.shape[0] * CHUNK - self.total_tokens
        filled = F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, missing)) if missing else tokens
        chunks = filled.unflatten(0, (-1, CHUNK)).transpose(1, 2)
        return chunks.to(dtype, memory_format=torch.contiguous_format, copy=True)

    def join(self, chunks: Tensor) -> Tensor:
        """Return (chunks, heads, CHUNK, size) as (total_tokens, heads, size), contiguous; the inverse of `split`."""
        return chunks.transpose(1, 2).flatten(0, 1)[: self.total_tokens].contiguous()


def chunks_of(batch: PackedBatch) -> Chunks:
    """Return the chunks of a batch, made at most once; they live and die with the batch."""
    return batch.derive(("chunks", batch.device), lambda: _build(batch))


def _build(batch: PackedBatch) -> Chunks:
    missing = -batch.total_tokens % CHUNK
    documents = F.pad(batch.seq_idx[0], (0, missing), value=_NOBODY).unflatten(0, (-1, CHUNK))
    ends = documents[:, -1]
    before = F.pad(ends[:-1], (1, 0), value=_NOBODY - 1)  # with which the chunk before ends: nothing, of the first
    causal = (documents[:, :, None] == documents[:, None, :]).tril()
    return Chunks(
        positions=batch.position_ids[0], causal=causal, sums=causal.double(), carry_in=documents == before[:, None],
        to_end=documents == ends[:, None], chain=(before[:, None] == ends[None, :]).tril(-1),
        longest=batch.bucketed_max_seqlen,
    )  # fmt: skip
