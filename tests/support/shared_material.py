"""Material of the tests of shared prefixes: random trees, and what a token of one sees by a loop over its documents."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def trees(draw: st.DrawFn, most: int = 7, longest: int = 6) -> tuple[list[int], list[int]]:
    """Lengths and parents of a few segments, any depth, several documents that begin anew among them."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return lengths, [draw(st.integers(-1, piece - 1)) for piece in range(len(lengths))]


def path_of(lengths: list[int], parents: list[int], piece: int) -> list[int]:
    """Tokens of the row from the beginning of a document to the end of one of its segments."""
    start = sum(lengths[:piece])
    own = list(range(start, start + lengths[piece]))
    return (path_of(lengths, parents, parents[piece]) if parents[piece] >= 0 else []) + own
