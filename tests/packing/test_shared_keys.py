"""How the keys of rows with shared prefixes travel, and are merged."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_material import seen_by, tree_row, trees

from fastpack_trl.packing.packed_batch import merge_batches


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(trees(), st.integers(0, 3)), min_size=1, max_size=3))
@example([(([1, 1], [-1, 0]), 3)])  # padding longer than any document
def test_merged_rows_have_the_keys_of_one_row(rows: list[tuple[tuple[list[int], list[int]], int]]) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    batches, lengths, parents = [], [], []
    for (own, up), padding in rows:
        batches.append(replace(tree_row(own, up, num_padding=padding), loss_positions=nothing, loss_labels=nothing))
        parents += [parent + len(lengths) * (parent >= 0) for parent in up]
        lengths += own
    merged, expected = merge_batches(batches), tree_row(lengths, parents)
    assert merged.seq_lengths == expected.seq_lengths
    assert torch.equal(merged.position_ids, expected.position_ids)
    for position in range(sum(lengths)):
        assert seen_by(merged, position) == seen_by(expected, position)
    assert (merged.shared is None) == (expected.shared is None)
    if merged.shared is not None and expected.shared is not None:
        assert torch.equal(merged.shared.cu_seqlens_k, expected.shared.cu_seqlens_k)
        assert merged.shared.prefix_lengths == expected.shared.prefix_lengths
        assert merged.shared.max_seqlen_k == expected.shared.max_seqlen_k
