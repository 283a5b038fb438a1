"""Few buckets serve nearly all rows of a run, at a cost that is counted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from static_material import make_rows

from fastpack_trl.packing.buckets import Bucket, RowSize, choose_buckets, smallest_fitting
from fastpack_trl.packing.packed_batch import rounded_length

Held = list[tuple[RowSize, Bucket]]
sizes = st.builds(
    lambda lengths, share, parts: RowSize(sum(lengths), len(lengths), max(lengths), int(sum(lengths) * share), parts),
    st.lists(st.integers(1, 900), min_size=1, max_size=30), st.floats(0, 1), st.integers(1, 4),
)  # fmt: skip


def packed_rows(row: int, mean: int, count: int, *, loss_share: float = 1.0, seed: int = 0) -> list[RowSize]:
    """Rows filled to 98 to 100 % with documents whose lengths are spread by a log-normal distribution."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        left, lengths = int(row * draw.uniform(0.98, 1.0)), []
        while left:
            lengths.append(min(left, max(4, int(draw.lognormvariate(0, 0.7) * mean))))
            left -= lengths[-1]
        counted = int((sum(lengths) - len(lengths)) * min(1.0, loss_share * draw.uniform(0.7, 1.3)))
        rows.append(RowSize(sum(lengths), len(lengths), max(lengths), counted, 1))
    return rows


def serve(rows: list[RowSize]) -> tuple[tuple[Bucket, ...], Held]:
    """Choose buckets; return them, and the rows that have one with the bucket of each."""
    buckets = choose_buckets(rows)
    held = [(size, bucket) for size in rows if (bucket := smallest_fitting(buckets, size)) is not None]
    assert all(bucket.holds(size) for size, bucket in held)
    assert len(held) >= 0.97 * len(rows)
    return buckets, held


def surplus(held: Held, name: str) -> float:
    """What buckets have beyond their rows, as a share of what these have."""
    return sum(getattr(bucket, name) for _, bucket in held) / sum(getattr(size, name) for size, _ in held) - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_buckets_hold_their_rows_in_any_order(rows: list[RowSize], at_most: int, draw: random.Random) -> None:
    buckets = choose_buckets(rows, at_most=at_most)
    assert len(buckets) <= at_most
    users = Counter(smallest_fitting(buckets, size) for size in rows)
    del users[None]
    assert list(buckets) == sorted(users, key=lambda bucket: (-users[bucket], bucket)), "the one that serves most first"
    for bucket in buckets:
        assert bucket.max_seqlen == rounded_length(bucket.max_seqlen), "a compiled layer sees no further lengths"
        assert 1 <= bucket.loss_tokens <= bucket.tokens
    assert choose_buckets(draw.sample(rows, len(rows)), at_most=at_most) == buckets


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(0, 3000), st.integers(0, 300), st.integers(-40, 40))
def test_holds_counts_the_pieces_of_the_tail(size: RowSize, tail: int, longer: int, surplus: int) -> None:
    longest = size.max_seqlen + longer
    needed = size.segments + len(range(0, tail, longest))
    bucket = Bucket(size.tokens + tail, max(0, needed + surplus), longest, size.loss_tokens, size.parts)
    assert bucket.segments_of(size) == needed
    assert bucket.holds(size) == (bucket.segments >= needed)


@pytest.mark.parametrize(("row", "mean"), [(2048, 200), (2048, 900), (8192, 300), (8192, 5000), (4096, 4096)])
def test_packed_rows_are_served_at_the_cost_of_their_fill(row: int, mean: int) -> None:
    rows = packed_rows(row, mean, 400)
    rare = RowSize(9000, 1, 9000, 8999, 1)
    buckets, held = serve([*rows, rare])
    assert rare not in dict(held), "a row beyond the ordinary has no bucket"
    assert surplus(held, "tokens") <= 0.03
    assert {(bucket.tokens, bucket.loss_tokens) for bucket in buckets} == {(row, row)}, "nearly all tokens count"
    blocks = sum(b.segments * b.max_seqlen - size.segments * size.max_seqlen for size, b in held) / len(held)
    assert 0.0025 * blocks <= 0.04 * row, "empty blocks of flash's grid cost what a few percent of the tokens do"
    assert len(buckets) <= 3


@pytest.mark.parametrize(("prefix", "own"), [(1000, 200), (300, 300), (40, 30)])
def test_rows_with_shared_prefixes_are_served(prefix: int, own: int) -> None:
    draw, rows = random.Random(0), []
    for _ in range(300):
        lengths: list[int] = []
        while sum(lengths) + len(lengths) * prefix < 8192 - prefix - own:
            lengths.append(max(4, int(draw.lognormvariate(0, 0.5) * own)))
        tokens, longest = prefix + sum(lengths), prefix + max(lengths)
        keys = len(lengths) * prefix + sum(lengths)
        rows.append(RowSize(tokens, len(lengths), prefix + lengths[0], tokens - 1, 1, keys, longest))
    rows.append(RowSize(rows[0].tokens, 3, 900, rows[0].tokens - 3, 1))
    buckets, held = serve(rows)
    assert all(bucket.keys for bucket in buckets), "a row that shares nothing needs no bucket of its own"
    assert surplus(held, "tokens") <= 0.08
    assert surplus([(size.with_keys, bucket) for size, bucket in held], "keys") <= 0.15


def test_padding_that_costs_more_than_it_saves_is_not_chosen() -> None:
    rows = [RowSize(tokens, 1, tokens, tokens - 1, 1) for tokens in (500, 900, 4000)] * 20
    (busy,) = choose_buckets(rows, at_most=1, eager_cost=0.1)
    assert busy.tokens == 4032
    assert all(busy.holds(size) for size in rows), "it fits all the same"
    assert choose_buckets(rows, at_most=1, eager_cost=3.0) == (busy,)
    some = {bucket.tokens for bucket in choose_buckets(rows, eager_cost=0.2)}
    assert some == {904, 4032}, "a third would save less than 2 % of all tokens"
    assert choose_buckets(rows[:1], eager_cost=0.0) == ()


def test_rows_of_which_little_counts_get_capacities_of_their_own() -> None:
    rows = packed_rows(2048, 200, 300, loss_share=0.2) + packed_rows(2048, 200, 300, loss_share=0.6, seed=1)
    buckets, held = serve(rows)
    capacities = [bucket.loss_tokens for bucket in buckets]
    assert min(capacities) < 900 < max(capacities) < 1800
    assert surplus(held, "loss_tokens") < 0.55


def test_merged_rows_have_buckets_with_their_parts() -> None:
    rows = packed_rows(512, 100, 200, seed=1)
    for one in packed_rows(512, 100, 200):
        rows.append(RowSize(4 * one.tokens, 4 * one.segments, one.max_seqlen, 4 * one.loss_tokens, 4))
    for bucket in serve(rows)[0]:
        assert bucket.parts == (4 if bucket.tokens > 512 else 1)


def test_the_cheapest_bucket_is_taken() -> None:
    small, large = Bucket(512, 4, 256, 512), Bucket(1024, 4, 256, 1024)
    row = make_rows([[100, 200], [50]])["packed_batch"]
    assert smallest_fitting([large, small], row) is None  # two parts
    two = [bucket._replace(parts=2) for bucket in (large, small)]
    assert smallest_fitting(two, row) == two[1]
    assert smallest_fitting(two, RowSize(900, 3, 250, 899, 1)) == two[0]


def test_no_row_or_no_bucket_is_an_error() -> None:
    for rows, at_most in (([], 4), ([RowSize(5, 1, 5, 4, 1)], 0)):
        with pytest.raises(
            ValueError, match=f"needs rows and room for a bucket: got {len(rows)} rows, at_most={at_most}"
        ):
            choose_buckets(rows, at_most=at_most)
