"""The masks of a row in chunks are those of its documents, also in a static batch, and are made once."""

from __future__ import annotations

import pytest
import torch
from static_material import bucket_for, make_rows, to_static

from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.static_batch import copy_into

LENGTHS = ((1,), (CHUNK,), (70, 58), (63, 1, 64, 65), (5, 300, 1, 1, 40))


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks_say_which_document_a_token_is_of(lengths: tuple[int, ...], padding: int) -> None:
    batch = PackedBatch.from_lengths(lengths, num_padding=padding)
    chunks = chunks_of(batch)
    assert chunks_of(batch) is chunks
    document = [index for index, length in enumerate(batch.segment_lengths) for _ in range(length)]
    count = -(-len(document) // CHUNK)
    document += [-1] * (count * CHUNK - len(document))
    rows = [document[start : start + CHUNK] for start in range(0, len(document), CHUNK)]
    for n, row in enumerate(rows):
        assert chunks.causal[n].tolist() == [[a == b and j <= i for j, b in enumerate(row)] for i, a in enumerate(row)]
        assert chunks.carry_in[n].tolist() == [n > 0 and token == rows[n - 1][-1] for token in row]
        assert chunks.to_end[n].tolist() == [token == row[-1] for token in row]
        assert chunks.chain[n].tolist() == [m < n and other[-1] == rows[n - 1][-1] for m, other in enumerate(rows)]
    assert torch.equal(chunks.sums, chunks.causal.double())
    assert torch.equal(chunks.positions, batch.position_ids[0])


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 128, 129, 130, 700])
def test_a_state_reaches_no_more_chunks_than_said(length: int) -> None:
    """Wherever the longest document begins, and no fewer: what is not multiplied is not read."""
    chunks = chunks_of(PackedBatch.from_lengths((length,)))
    assert chunks.longest >= length
    entered = [(start + length - 1) // CHUNK - start // CHUNK for start in range(CHUNK)]
    assert chunks._replace(longest=length).reach == max(entered)


def test_split_and_join_are_inverse() -> None:
    chunks = chunks_of(PackedBatch.from_lengths((70, 30)))
    tokens = torch.randn(100, 2, 3)
    parts = chunks.split(tokens, torch.float64)
    assert (parts.shape, parts.dtype, parts.is_contiguous()) == ((2, 2, CHUNK, 3), torch.float64, True)
    assert not parts[1, :, 100 - CHUNK :].any()
    assert torch.equal(chunks.join(parts), tokens.double())


def test_a_static_batch_has_the_masks_of_the_documents_that_are_in_it() -> None:
    first, second = make_rows([[70, 30, 20]]), make_rows([[10, 60, 3, 30]])
    static = to_static(first, bucket_for(first, tail=8, segments=2))
    shapes = [getattr(part, "shape", part) for part in chunks_of(static.batch)]
    static.batch.clear_derived()
    copy_into(static, second)
    chunks, plain = chunks_of(static.batch), chunks_of(second["packed_batch"])
    assert [getattr(part, "shape", part) for part in chunks] == shapes
    tokens = second["packed_batch"].total_tokens - CHUNK
    for mine, other in ((chunks.causal, plain.causal), (chunks.carry_in, plain.carry_in)):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1, :tokens], other[1, :tokens])
