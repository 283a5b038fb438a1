"""`merge_batches`: the metadata of several rows becomes that of one, without asking the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastpack_trl import PackedBatch
from fastpack_trl.packing.packed_batch import Part, merge_batches
from fastpack_trl.step.merging import group_by_tokens
from fastpack_trl.testing import count_host_syncs


def _labelled(lengths: list[int], num_padding: int, seed: int) -> tuple[PackedBatch, Tensor]:
    total = sum(lengths) + num_padding
    labels = torch.randint(0, 90, (total,), generator=torch.Generator().manual_seed(seed))
    labels[::3] = -100
    return PackedBatch.from_lengths(lengths, num_padding=num_padding, labels=labels), labels[: sum(lengths)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3)), min_size=1, max_size=5)
)
def test_a_merged_row_is_the_row_of_all_its_documents(rows: list[tuple[list[int], int]]) -> None:
    batches, labels = zip(*(_labelled(*row, seed) for seed, row in enumerate(rows)), strict=True)
    with count_host_syncs(device="cpu") as syncs:
        merged = merge_batches(batches)
    assert syncs.total == 0, syncs
    expected = PackedBatch.from_lengths([n for lengths, _ in rows for n in lengths], labels=torch.cat(labels))
    for name in ("cu_seqlens", "position_ids", "seq_idx", "loss_positions", "loss_labels"):
        actual, wanted = getattr(merged, name), getattr(expected, name)
        assert actual.dtype == wanted.dtype, name
        assert torch.equal(actual, wanted), name
    assert (merged.seq_lengths, merged.max_seqlen, merged.num_padding) == (expected.seq_lengths, expected.max_seqlen, 0)
    assert merged.parts == tuple(
        Part(sum(lengths), sum(lengths) + padding, len(batch.loss_positions))
        for (lengths, padding), batch in zip(rows, batches, strict=True)
    )


def test_rows_that_do_not_say_where_their_loss_is_are_refused() -> None:
    with pytest.raises(ValueError, match="give the collator labels"):
        merge_batches([PackedBatch.from_lengths([3])])
    with pytest.raises(ValueError, match="one batch or more"):
        merge_batches([])


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 120))
def test_groups_keep_the_order_and_the_limit(tokens: list[int], limit: int) -> None:
    groups = group_by_tokens(tokens, limit)
    assert [place for group in groups for place in group] == list(range(len(tokens)))
    sizes = [sum(tokens[place] for place in group) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        assert size <= limit or len(group) == 1
    for group, following, size in zip(groups, groups[1:], sizes, strict=False):
        assert size + tokens[following[0]] > limit, group  # as few groups as the order allows
