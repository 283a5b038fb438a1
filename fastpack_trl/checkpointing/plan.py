"""The plan: a level for every layer, with the least recompute that fits a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.levels import Level, describe

WORKING_SHARE = 1.5
"""Of the activations of one layer: what its recompute and backward hold at once, gradients included."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes as a function of the batch: ``constant + per_token * tokens + per_pair * tokens * longest``."""

    constant: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    """Per token and token of the longest document: attention that keeps its scores."""

    def at(self, tokens: int, longest: int) -> int:
        return max(0, round(self.constant + self.per_token * tokens + self.per_pair * tokens * longest))

    @classmethod
    def through(cls, points: Sequence[tuple[int, int]]) -> Growth:
        """Return the parabola through three measurements (tokens of one document, bytes)."""
        (a, fa), (b, fb), (c, fc) = points
        slope, next_slope = (fb - fa) / (b - a), (fc - fb) / (c - b)
        pair = (next_slope - slope) / (c - a)
        token = slope - pair * (a + b)
        return cls(fa - token * a - pair * a * a, token, pair)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Costs of the levels of a model.

    Attributes:
        growth: per level that the model supports, one `Growth` per layer: bytes kept on the device.
        seconds: per level, of recompute and waiting for copies in one layer, in any common unit.
        products: per level, matrix-product operations of the recompute / those of the step without any.
        working: what a layer's backward holds beside all that it keeps, where that is known to be more than
            `WORKING_SHARE` says, e.g. for a stack of experts that is made dense.
    """

    growth: Mapping[Level, Sequence[Growth]]
    seconds: Mapping[Level, float]
    products: Mapping[Level, float]
    working: Growth = Growth()

    @property
    def layers(self) -> int:
        return len(self.growth[Level.KEEP])

    def bytes_of(self, levels: Sequence[Level], tokens: int, longest: int) -> int:
        """Return the bytes kept on the device between forward and backward."""
        return sum(self.growth[level][index].at(tokens, longest) for index, level in enumerate(levels))

    def peak_bytes(self, levels: Sequence[Level], tokens: int, longest: int) -> int:
        """Return the most that layers hold at once: in backward, what those before keep and what one works on.

        The layers after it have freed theirs by then, so that kept ones at the end and recomputed ones at the beginning
        need their memory one after the other.
        """
        kept = peak = 0.0
        for index, level in enumerate(levels):
            whole = self.growth[Level.KEEP][index].at(tokens, longest)
            kept += self.growth[level][index].at(tokens, longest)
            work = max(whole * (WORKING_SHARE - 1), self.working.at(tokens, longest))
            peak = max(peak, kept + work + (0 if level is Level.KEEP else whole))
        return round(peak)


@dataclass(frozen=True, slots=True)
class Plan:
    """A level for every layer.

    Attributes:
        levels: first layer to last.
        predicted: the most that is kept and in work at once, at the largest row.
        budget: bytes that there are for them.
        recompute: share of matrix-product operations done a second time, of those of a step without recompute.
    """

    levels: tuple[Level, ...]
    predicted: int
    budget: int
    recompute: float

    @property
    def fits(self) -> bool:
        return self.predicted <= self.budget

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is recomputed."""
        return set(self.levels) == {Level.KEEP}

    @property
    def left(self) -> int:
        """Return the bytes of the budget that no activation needs."""
        return max(0, self.budget - self.predicted)

    def __str__(self) -> str:
        fit = "of" if self.fits else "over the"
        return (
            f"{describe(self.levels)}; predicted {self.predicted / GIB:.2f} GiB {fit} {self.budget / GIB:.2f} GiB, "
            f"recompute {self.recompute:.0%} of the matrix products"
        )


def make_plan(costs: LayerCosts, levels: Sequence[Level], *, budget: int, tokens: int, longest: int) -> Plan:
    """Return the plan that has these levels."""
    predicted = costs.peak_bytes(levels, tokens, longest)
    recompute = sum(costs.products[level] for level in levels) / len(levels)
    return Plan(tuple(levels), predicted, budget, recompute)


def choose_levels(costs: LayerCosts, *, budget: int, tokens: int, longest: int, deepest: Level = Level.OFFLOAD) -> Plan:
    """Return the plan of least recompute that fits `budget`, layer by layer; the last layers are the first to be kept.

    Two levels at most: with layers of one size the best mix for a given memory is, but for the rounding to whole
    layers, one of two neighbours on the lower convex hull of (bytes, seconds). So all pairs are tried.

    Args:
        budget: bytes for what layers keep and for the layer in work.
        tokens: of the largest row.
        longest: of its longest document.
        deepest: levels past it are not used.

    Returns:
        The plan; where nothing fits, that of the least memory (`Plan.fits` is False).
    """
    levels, layers = worthwhile(costs, tokens, longest, deepest), costs.layers

    def plan(kept: Level, below: Level, count: int) -> Plan:
        mix = [below] * (layers - count) + [kept] * count
        return make_plan(costs, mix, budget=budget, tokens=tokens, longest=longest)

    def seconds(plan: Plan) -> float:
        return sum(costs.seconds[level] for level in plan.levels)

    # Keeping everything is tried even where another level is as fast with less: nothing is recomputed, and the layer in
    # work takes less.
    mixes = [(Level.KEEP, Level.KEEP, 0), (levels[0], levels[0], 0)]
    for index, below in enumerate(levels):
        mixes += [(kept, below, count) for kept in levels[:index] for count in range(layers)]
    plans = [plan(*mix) for mix in mixes]
    fitting = [one for one in plans if one.fits]
    if not fitting:
        return plan(levels[-1], levels[-1], 0)
    return min(fitting, key=lambda one: (seconds(one), one.predicted))


def worthwhile(costs: LayerCosts, tokens: int, longest: int, deepest: Level = Level.OFFLOAD) -> list[Level]:
    """Return the levels that no other beats in both time and memory, most memory first."""
    size = {
        level: costs.bytes_of([level] * costs.layers, tokens, longest) for level in costs.growth if level <= deepest
    }
    found: list[Level] = []
    for level in sorted(size, key=lambda level: (costs.seconds[level], size[level], -level)):
        if not found or size[level] < size[found[-1]]:
            found.append(level)
    return found


def deeper(costs: LayerCosts, plan: Plan, *, tokens: int, longest: int, deepest: Level) -> Plan | None:
    """Return the next plan with less memory: layers above a level go down to it; None at the end."""
    for level in worthwhile(costs, tokens, longest, deepest):
        levels = [max(level, own) for own in plan.levels]
        below = make_plan(costs, levels, budget=plan.budget, tokens=tokens, longest=longest)
        # Less at the peak, or at the end of forward, where the head has its own.
        kept, before = (costs.bytes_of(one, tokens, longest) for one in (levels, plan.levels))
        if below.predicted < plan.predicted or kept < before:
            return below
    return None
