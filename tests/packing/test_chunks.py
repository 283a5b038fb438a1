"""The masks of a row in chunks are those of its documents, also in a static batch, and are made once."""

from __future__ import annotations

import pytest
import torch
from static_material import bucket_for, make_rows, to_static

from fastpack_trl.packing.chunks import CHUNK, Chunks, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch


def checked_chunks(batch: PackedBatch) -> Chunks:
    """The chunks of a batch, compared with a loop over its tokens."""
    chunks = chunks_of(batch)
    assert chunks_of(batch) is chunks
    document = [index for index, length in enumerate(batch.cu_seqlens.diff().tolist()) for _ in range(length)]
    document += [-1] * (-len(document) % CHUNK)
    rows = [document[start : start + CHUNK] for start in range(0, len(document), CHUNK)]
    for n, row in enumerate(rows):
        assert chunks.causal[n].tolist() == [[a == b and j <= i for j, b in enumerate(row)] for i, a in enumerate(row)]
        assert chunks.carry_in[n].tolist() == [n > 0 and token == rows[n - 1][-1] for token in row]
        assert chunks.to_end[n].tolist() == [token == row[-1] for token in row]
        assert chunks.chain[n].tolist() == [m < n and other[-1] == rows[n - 1][-1] for m, other in enumerate(rows)]
    assert torch.equal(chunks.sums, chunks.causal.double())
    assert torch.equal(chunks.positions, batch.position_ids[0])
    return chunks


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("lengths", [(1,), (CHUNK,), (70, 58), (63, 1, 64, 65), (5, 300, 1, 1, 40)], ids=str)
def test_masks_are_those_of_the_documents(lengths: tuple[int, ...], padding: int) -> None:
    checked_chunks(PackedBatch.from_lengths(lengths, num_padding=padding))


def test_a_static_batch_has_the_masks_of_the_documents_copied_into_it() -> None:
    first, second = make_rows([[70, 30, 20]]), make_rows([[10, 60, 3, 30]])
    static = to_static(first, bucket_for(first, tail=8, segments=2))
    shapes = [getattr(part, "shape", part) for part in checked_chunks(static.batch)]
    static.batch.clear_derived()
    static.copy_row(second["packed_batch"], second["input_ids"])
    assert [getattr(part, "shape", part) for part in checked_chunks(static.batch)] == shapes


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 128, 129, 130, 700])
def test_reach_is_the_most_chunks_that_a_document_enters(length: int) -> None:
    """Wherever the longest document begins: what is not multiplied is not read."""
    chunks = chunks_of(PackedBatch.from_lengths((length,)))
    assert chunks.longest >= length
    entered = [(start + length - 1) // CHUNK - start // CHUNK for start in range(CHUNK)]
    assert chunks._replace(longest=length).reach == max(entered)
