"""Few buckets serve nearly all rows of a run, with little padding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack_trl.packing.buckets import MOST_BUCKETS, Bucket, Buckets
from fastpack_trl.packing.packed_batch import rounded_length

plain = st.lists(st.integers(1, 900), min_size=1, max_size=30).map(
    lambda lengths: Bucket(sum(lengths), len(lengths), max(lengths))
)


@st.composite
def sharing(draw: st.DrawFn) -> Bucket:
    """The size of a row of documents that follow one prefix."""
    prefix, own = draw(st.integers(1, 900)), draw(st.lists(st.integers(1, 300), min_size=2, max_size=20))
    keys = len(own) * prefix + sum(own)
    return Bucket(prefix + sum(own), len(own), prefix + own[0], keys, prefix + max(own))


@st.composite
def with_images(draw: st.DrawFn) -> Bucket:
    """The size of a row some of whose documents have images, each with a text before it."""
    lengths, keys, tokens = draw(st.lists(st.integers(1, 900), min_size=1, max_size=12)), list[int](), 0
    for length in lengths:
        start = 0
        for image in draw(st.lists(st.integers(1, 300), max_size=4)):
            if start + image <= length:
                start += image
                tokens += image
                keys.append(start)
    size = Bucket(sum(lengths), len(lengths), max(lengths))
    return size._replace(images=len(keys), image_tokens=tokens, image_keys=sum(keys))


sizes = plain | sharing()
of_images = plain | with_images()


def packed_rows(row: int, mean: int) -> list[Bucket]:
    """Rows filled to 98 to 100 % with documents whose lengths are spread by a log-normal distribution."""
    draw, rows = random.Random(0), []
    for _ in range(400):
        left, lengths = int(row * draw.uniform(0.98, 1.0)), []
        while left:
            lengths.append(min(left, max(4, int(draw.lognormvariate(0, 0.7) * mean))))
            left -= lengths[-1]
        rows.append(Bucket(sum(lengths), len(lengths), max(lengths)))
    return rows


def unpacked_rows(documents: int) -> list[Bucket]:
    """Rows of so many documents each, as they come."""
    draw = random.Random(1)
    rows = [[max(4, int(draw.lognormvariate(0, 0.6) * 250)) for _ in range(documents)] for _ in range(400)]
    return [Bucket(sum(lengths), documents, max(lengths)) for lengths in rows]


def shared_rows(prefix: int, own: int) -> list[Bucket]:
    """Rows of documents with one prefix, the longest of them first, and a row that shares nothing."""
    draw, rows = random.Random(0), []
    for _ in range(300):
        lengths: list[int] = []
        while sum(lengths) + len(lengths) * prefix < 8192 - prefix - own:
            lengths.append(max(4, int(draw.lognormvariate(0, 0.5) * own)))
        keys = len(lengths) * prefix + sum(lengths)
        rows.append(Bucket(prefix + sum(lengths), len(lengths), prefix + lengths[0], keys, prefix + max(lengths)))
    return [*rows, Bucket(rows[0].tokens, 3, 900)]


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40) | st.lists(of_images, min_size=1, max_size=40))
def test_a_bucket_holds_its_row_and_there_are_few(rows: list[Bucket]) -> None:
    buckets = Buckets()
    for size in rows:
        found = buckets.find(size)
        assert found is None or (found.holds(size) and found.tokens <= 3 * max(size.tokens + 7, 1.1 * size.tokens))
        assert found is not None or size.keys or len(buckets.made) > MOST_BUCKETS / 2
    assert len(buckets.made) <= MOST_BUCKETS
    assert buckets.made or all(size.keys for size in rows)
    assert all(bucket.max_seqlen == rounded_length(bucket.max_seqlen) for bucket in buckets.made)


@settings(max_examples=50, deadline=None)
@given(plain, st.integers(0, 3000), st.integers(0, 300), st.integers(-40, 40))
def test_holds_counts_the_pieces_of_the_tail(size: Bucket, tail: int, longer: int, more: int) -> None:
    longest = size.max_seqlen + longer
    needed = size.segments + len(range(0, tail, longest))
    bucket = Bucket(size.tokens + tail, max(0, needed + more), longest)
    assert size.segments + bucket.pieces_of(size) == needed
    assert bucket.holds(size) == (bucket.segments >= needed)


@pytest.mark.parametrize(
    ("rows", "most", "cost"),
    [
        (packed_rows(2048, 200), 6, 0.03),
        (packed_rows(2048, 900), 2, 0.03),
        (packed_rows(8192, 300), 6, 0.03),
        (packed_rows(3000, 300), 9, 0.05),
        (packed_rows(4096, 4096), 2, 0.03),
        (unpacked_rows(1), MOST_BUCKETS, 0.2),
        (unpacked_rows(8), MOST_BUCKETS, 0.2),
        (shared_rows(1000, 200), MOST_BUCKETS, 0.1),
        (shared_rows(40, 30), MOST_BUCKETS, 0.1),
    ],
)
def test_rows_are_served_at_little_more_than_their_cost(rows: list[Bucket], most: int, cost: float) -> None:
    """The blocks of an attention kernel's grid that find nothing to do, and surplus keys, are part of the cost."""
    buckets = Buckets()
    held = [(size, found) for size in rows if (found := buckets.find(size)) is not None]
    assert len(buckets.made) <= most
    assert len(held) >= 0.95 * len(rows)
    assert sum(found.cost for _, found in held) <= (1 + cost) * sum(size.cost for size, _ in held)


def test_a_row_is_not_padded_to_several_times_its_length() -> None:
    buckets = Buckets()
    for number in range(2 * MOST_BUCKETS):
        buckets.find(Bucket(9000 + 1000 * number, 4, 4000))
    assert buckets.find(Bucket(9000, 4, 4000)) is not None
    short = [buckets.find(Bucket(2000, number, 900)) for number in range(1, 30)]
    assert None in short
    assert all(found is None or found.tokens < 6000 for found in short)
