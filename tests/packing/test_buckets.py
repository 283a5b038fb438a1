"""Few buckets serve nearly all rows of a run, at a cost that is counted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from static_material import make_rows

from fastpack_trl.packing.buckets import Bucket, RowSize, choose_buckets, smallest_fitting
from fastpack_trl.packing.packed_batch import rounded_length


def packed_rows(row: int, mean: int, count: int, *, loss_share: float = 1.0, seed: int = 0) -> list[RowSize]:
    """Rows filled to 98 to 100 % with documents whose lengths are spread by a log-normal distribution."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        left, lengths = int(row * draw.uniform(0.98, 1.0)), []
        while left:
            lengths.append(min(left, max(4, int(draw.lognormvariate(0, 0.7) * mean))))
            left -= lengths[-1]
        counted = sum(lengths) - len(lengths)
        if loss_share < 1:
            counted = int(counted * min(1.0, loss_share * draw.uniform(0.7, 1.3)))
        rows.append(RowSize(sum(lengths), len(lengths), max(lengths), counted, 1))
    return rows


sizes = st.builds(
    lambda lengths, share, parts: RowSize(sum(lengths), len(lengths), max(lengths), int(sum(lengths) * share), parts),
    st.lists(st.integers(1, 900), min_size=1, max_size=30), st.floats(0, 1), st.integers(1, 4),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_what_is_served_fits_and_what_it_costs_is_said(rows: list[RowSize], at_most: int, draw: random.Random) -> None:
    choice = choose_buckets(rows, at_most=at_most)
    assert len(choice.buckets) <= at_most
    served = [(size, bucket) for size in rows if (bucket := smallest_fitting(choice.buckets, size)) is not None]
    assert all(bucket.holds(size) for size, bucket in served)
    assert choice.served == pytest.approx(len(served) / len(rows))
    tokens, loss = sum(size.tokens for size, _ in served), sum(size.loss_tokens for size, _ in served)
    if tokens:
        assert choice.padding == pytest.approx(sum(b.tokens - size.tokens for size, b in served) / tokens)
    if loss:
        assert choice.loss_padding == pytest.approx(sum(b.loss_tokens - size.loss_tokens for size, b in served) / loss)
    for bucket in choice.buckets:
        assert bucket.max_seqlen == rounded_length(bucket.max_seqlen), "a compiled layer sees no further lengths"
        assert bucket in {b for _, b in served}
        assert 1 <= bucket.loss_tokens <= bucket.tokens
    shuffled = draw.sample(rows, len(rows))
    assert choose_buckets(shuffled, at_most=at_most) == choice


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(0, 3000), st.integers(0, 300), st.integers(-40, 40))
def test_holds_counts_the_pieces_of_the_tail(size: RowSize, tail: int, longer: int, segments: int) -> None:
    longest = size.max_seqlen + longer
    pieces = len(range(0, tail, longest))
    bucket = Bucket(
        size.tokens + tail, max(0, size.segments + pieces + segments), longest, size.loss_tokens, size.parts
    )
    assert bucket.segments_of(size) == size.segments + pieces
    assert bucket.holds(size) == (bucket.segments >= size.segments + pieces)


@pytest.mark.parametrize(("row", "mean"), [(2048, 200), (2048, 900), (8192, 300), (8192, 5000), (4096, 4096)])
def test_packed_rows_are_served_at_the_cost_of_their_fill(row: int, mean: int) -> None:
    rows = packed_rows(row, mean, 400)
    choice = choose_buckets(rows)
    assert choice.served >= 0.97
    assert choice.padding <= 0.03
    assert {bucket.tokens for bucket in choice.buckets} == {row}, "one length of the row"
    assert {bucket.loss_tokens for bucket in choice.buckets} == {row}, "one capacity where nearly all tokens count"
    held = [(size, bucket) for size in rows if (bucket := smallest_fitting(choice.buckets, size)) is not None]
    blocks = sum(b.segments * b.max_seqlen - size.segments * size.max_seqlen for size, b in held) / len(held)
    assert 0.0025 * blocks <= 0.04 * row, "empty blocks of flash's grid cost what a few percent of the tokens do"
    assert len(choice.buckets) <= 3


def test_padding_that_costs_more_than_it_saves_is_not_chosen() -> None:
    rows = [RowSize(tokens, 1, tokens, tokens - 1, 1) for tokens in (500, 900, 4000)] * 20
    busy, idle = (choose_buckets(rows, at_most=1, eager_cost=cost) for cost in (0.1, 3.0))
    assert {bucket.tokens for bucket in busy.buckets} == {4032}
    assert [smallest_fitting(busy.buckets, size) is not None for size in rows[:3]] == [True] * 3, "it fits all the same"
    assert choose_buckets(rows, at_most=3, eager_cost=0.2).padding < 0.1
    assert choose_buckets(rows[:1], eager_cost=0.0).buckets == ()
    assert idle.served == 1.0


def test_rows_of_which_little_counts_get_capacities_of_their_own() -> None:
    rows = packed_rows(2048, 200, 300, loss_share=0.2) + packed_rows(2048, 200, 300, loss_share=0.6, seed=1)
    choice = choose_buckets(rows)
    assert choice.served >= 0.97
    assert max(bucket.loss_tokens for bucket in choice.buckets) < 1800
    assert min(bucket.loss_tokens for bucket in choice.buckets) < 900
    assert choice.loss_padding < 0.55


def test_a_row_beyond_the_ordinary_gets_no_bucket() -> None:
    rows = [*packed_rows(2048, 300, 400), RowSize(9000, 1, 9000, 8999, 1)]
    choice = choose_buckets(rows)
    assert {bucket.tokens for bucket in choice.buckets} == {2048}
    assert choice.served >= 0.97
    assert smallest_fitting(choice.buckets, rows[-1]) is None


def test_merged_rows_and_rows_by_themselves() -> None:
    merged = [
        RowSize(4 * size.tokens, 4 * size.segments, size.max_seqlen, 4 * size.loss_tokens, 4)
        for size in packed_rows(512, 100, 200)
    ]
    choice = choose_buckets([*merged, *packed_rows(512, 100, 200, seed=1)])
    assert choice.served >= 0.97
    for bucket in choice.buckets:
        assert bucket.parts == (4 if bucket.tokens > 512 else 1)


def test_the_cheapest_bucket_is_taken() -> None:
    small, large = Bucket(512, 4, 256, 512), Bucket(1024, 4, 256, 1024)
    row = make_rows([[100, 200], [50]])["packed_batch"]
    assert smallest_fitting([large, small], row) is None  # two parts
    two = [bucket._replace(parts=2) for bucket in (large, small)]
    assert smallest_fitting(two, row) == two[1]
    assert smallest_fitting(two, RowSize(900, 3, 250, 899, 1)) == two[0]


def test_no_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs rows and room for a bucket"):
        choose_buckets([])
    with pytest.raises(ValueError, match="at_most=0"):
        choose_buckets([RowSize(5, 1, 5, 4, 1)], at_most=0)
