"""The largest row that fits: predicted from smaller ones, then looked for around the prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastpack_trl.checkpointing.plan import Growth

MULTIPLE = 256
"""Tokens of which a row has a multiple."""
STEP = 1 / 8
"""Resolution of the largest row, of its length."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes, or seconds, of a row as a function of its tokens; never below what the longest measured row took."""

    growth: Growth
    points: tuple[tuple[int, int], ...]

    @classmethod
    def through(cls, points: Sequence[tuple[int, int]]) -> Curve:
        """Return the parabola through the last three points (masks and scores grow by the square), else the line.

        Raises:
            ValueError: fewer than two points.
        """
        points = sorted(points)[-3:]
        if len(points) < 2:
            raise ValueError(f"{len(points)} of the rows for a prediction could be run; two are needed")
        if len(points) == 3:
            parabola = Growth.through(points)
            if parabola.per_pair > 0:
                return cls(parabola, tuple(points))
        (a, fa), (b, fb) = points[-2:]
        slope = max(0.0, (fb - fa) / (b - a))
        return cls(Growth(fb - slope * b, slope), tuple(points))

    def at(self, tokens: int) -> int:
        """Return the value at a row of so many tokens."""
        return self.growth.at(tokens, tokens)

    def tokens(self, limit: float, longest: int) -> int:
        """Return the tokens of the largest row, at most `longest`, whose value is at most `limit`; 0 if none is."""
        low, high = 0, longest // MULTIPLE
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle * MULTIPLE) <= limit else (low, middle - 1)
        return low * MULTIPLE


def largest_row(fits: Callable[[int], bool | None], guess: int, *, longest: int, tries: int = 10) -> int:
    """Return the tokens of the largest row that fits: from `guess` up until one does not, or down until one does.

    Args:
        fits: runs a row; None where it must not be run any more (no time).

    Returns:
        0 where none of those that were run fits.
    """
    found, failed, tokens = 0, False, min(max(_multiple(guess), MULTIPLE), longest)
    for _ in range(tries):
        fitted = fits(tokens)
        if fitted is None:
            break
        if fitted:
            found = max(found, tokens)
            tokens = max(_multiple(tokens * (1 + STEP)), tokens + MULTIPLE)
        else:
            failed = True
            tokens = min(_multiple(tokens * (1 - STEP)), tokens - MULTIPLE)
        if (found and failed) or not MULTIPLE <= tokens <= longest:
            break
    return found


def _multiple(tokens: float) -> int:
    return math.floor(tokens / MULTIPLE) * MULTIPLE
