"""Few buckets serve nearly all rows of a run, with little padding."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastpack_trl.packing.buckets import MOST_BUCKETS, Bucket, choose_buckets, smallest_fitting
from fastpack_trl.packing.packed_batch import rounded_length

Held = list[tuple[Bucket, Bucket]]
sizes = st.lists(st.integers(1, 900), min_size=1, max_size=30).map(
    lambda lengths: Bucket(sum(lengths), len(lengths), max(lengths))
)


def packed_rows(row: int, mean: int, count: int) -> list[Bucket]:
    """Rows filled to 98 to 100 % with documents whose lengths are spread by a log-normal distribution."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        left, lengths = int(row * draw.uniform(0.98, 1.0)), []
        while left:
            lengths.append(min(left, max(4, int(draw.lognormvariate(0, 0.7) * mean))))
            left -= lengths[-1]
        rows.append(Bucket(sum(lengths), len(lengths), max(lengths)))
    return rows


def unpacked_rows(count: int) -> list[Bucket]:
    """Rows of eight documents each, as they come."""
    draw = random.Random(1)
    documents = [[max(4, int(draw.lognormvariate(0, 0.6) * 250)) for _ in range(8)] for _ in range(count)]
    return [Bucket(sum(lengths), 8, max(lengths)) for lengths in documents]


def serve(rows: list[Bucket]) -> tuple[tuple[Bucket, ...], Held]:
    """Choose buckets; return them, and the rows that have one with the bucket of each."""
    buckets = choose_buckets(rows)
    held = [(size, bucket) for size in rows if (bucket := smallest_fitting(buckets, size)) is not None]
    assert len(held) >= 0.95 * len(rows)
    return buckets, held


def surplus(held: Held, name: str = "tokens") -> float:
    """What buckets have beyond their rows, as a share of what these have."""
    return sum(getattr(bucket, name) for _, bucket in held) / sum(getattr(size, name) for size, _ in held) - 1


MIXED = [Bucket(1, 1, 1)] * 4 + [Bucket(221, 2, 220), Bucket(1163, 2, 900), Bucket(3917, 8, 896), Bucket(3051, 15, 896)]
"""Fewer tokens than the longest row, cut into more documents: its tail needs several."""


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.randoms(use_true_random=False))
@example(MIXED, random.Random(0))
def test_buckets_hold_their_rows_in_any_order(rows: list[Bucket], draw: random.Random) -> None:
    buckets = choose_buckets(rows)
    assert 1 <= len(buckets) <= MOST_BUCKETS
    assert all(smallest_fitting(buckets, size) for size in rows), "each of up to fifty rows is more than two percent"
    assert all(bucket.max_seqlen == rounded_length(bucket.max_seqlen) for bucket in buckets)
    assert choose_buckets(draw.sample(rows, len(rows))) == buckets


@settings(max_examples=50, deadline=None)
@given(sizes, st.integers(0, 3000), st.integers(0, 300), st.integers(-40, 40))
def test_holds_counts_the_pieces_of_the_tail(size: Bucket, tail: int, longer: int, more: int) -> None:
    longest = size.max_seqlen + longer
    needed = size.segments + len(range(0, tail, longest))
    bucket = Bucket(size.tokens + tail, max(0, needed + more), longest)
    assert size.segments + bucket.pieces_of(size) == needed
    assert bucket.holds(size) == (bucket.segments >= needed)


@pytest.mark.parametrize(("row", "mean"), [(2048, 200), (2048, 900), (8192, 300), (8192, 5000), (4096, 4096)])
def test_packed_rows_are_served_at_the_cost_of_their_fill(row: int, mean: int) -> None:
    rows, rare = packed_rows(row, mean, 400), Bucket(9000, 1, 9000)
    buckets, held = serve([*rows, rare])
    assert rare not in dict(held), "a row beyond the ordinary has no bucket"
    assert {bucket.tokens for bucket in buckets} == {row}
    assert surplus(held) <= 0.03
    blocks = sum(b.segments * b.max_seqlen - size.segments * size.max_seqlen for size, b in held) / len(held)
    assert 0.0025 * blocks <= 0.05 * row, "empty blocks of flash's grid cost what a few percent of the tokens do"


def test_rows_of_any_length_are_served_by_four_buckets() -> None:
    buckets, held = serve(unpacked_rows(400))
    assert len(buckets) == MOST_BUCKETS
    assert surplus(held) <= 0.15


@pytest.mark.parametrize(("prefix", "own"), [(1000, 200), (300, 300), (40, 30)])
def test_rows_with_shared_prefixes_are_served(prefix: int, own: int) -> None:
    draw, rows = random.Random(0), []
    for _ in range(300):
        lengths: list[int] = []
        while sum(lengths) + len(lengths) * prefix < 8192 - prefix - own:
            lengths.append(max(4, int(draw.lognormvariate(0, 0.5) * own)))
        keys = len(lengths) * prefix + sum(lengths)
        rows.append(Bucket(prefix + sum(lengths), len(lengths), prefix + lengths[0], keys, prefix + max(lengths)))
    rows.append(Bucket(rows[0].tokens, 3, 900))
    buckets, held = serve(rows)
    assert all(bucket.keys for bucket in buckets), "a row that shares nothing needs no bucket of its own"
    assert surplus(held) <= 0.1
    assert surplus([(size.with_keys, bucket) for size, bucket in held], "keys") <= 0.15


def test_the_cheapest_bucket_is_taken() -> None:
    small, large = Bucket(512, 4, 256), Bucket(1024, 4, 256)
    assert smallest_fitting([large, small], Bucket(350, 3, 200)) == small
    assert smallest_fitting([large, small], Bucket(900, 3, 250)) == large
    assert smallest_fitting([large, small], Bucket(900, 3, 300)) is None
