"""Three memory levels of a decoder layer for its backward pass, and the plan that gives each layer one of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any

from torch.utils.checkpoint import checkpoint

from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import CHECKPOINT
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.upstream import GradientCheckpointingLayer

WORKING_SHARE = 0.5
"""Share of what a layer keeps that its backward pass holds in addition: gradients of activations."""


class Level(IntEnum):
    """Activations that a layer keeps, from most to least.

    Levels in between, which keep the results of attention or of matmuls, were chosen by none of 122 recorded plans.
    """

    KEEP = 0
    """Everything that autograd saves."""
    CHECKPOINT = 1
    """The layer's input."""
    OFFLOAD = 2
    """Nothing on the device: the layer's input is in host memory."""

    def __str__(self) -> str:
        return self.name.lower()


def describe(levels: Sequence[Level]) -> str:
    """Return the layers of each level in runs: ``"offload 0-11, checkpoint 12-31"``."""
    runs = [list(run) for _, run in groupby(range(len(levels)), key=levels.__getitem__)]
    return ", ".join(f"{levels[run[0]]} {run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)


def checkpointable_layers(model: Any) -> list[GradientCheckpointingLayer]:
    """Return the layers of `model` that transformers can checkpoint, first to last."""
    return [module for module in text_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def level_function(level: Level) -> Callable[..., Any]:
    """Return the checkpoint function of a layer at `level`; `OFFLOAD` has the one of `CHECKPOINT`."""
    return operator.call if level is Level.KEEP else functools.partial(checkpoint, use_reentrant=False)


@contextmanager
def layer_functions(
    layers: Sequence[GradientCheckpointingLayer], functions: Sequence[tuple[Callable[..., Any], bool]]
) -> Iterator[None]:
    """Give each layer its own checkpoint function, and whether it is called at all; both are restored afterwards."""
    with ExitStack() as stack:
        for layer, (function, enabled) in zip(layers, functions, strict=True):
            stack.enter_context(patch_attribute(layer, CHECKPOINT, function))
            stack.enter_context(patch_attribute(layer, "gradient_checkpointing", enabled))
        yield


@contextmanager
def layer_levels(
    layers: Sequence[GradientCheckpointingLayer], levels: Sequence[Level], **offload: Any
) -> Iterator[Offload | None]:
    """Put every layer at its level while the context is open; yield the offload if a layer has that level.

    Args:
        layers: all decoder layers, first to last.
        levels: one per layer.
        offload: arguments of `offload_checkpoints`.
    """
    with ExitStack() as stack:
        functions = [(level_function(level), level is not Level.KEEP) for level in levels]
        stack.enter_context(layer_functions(layers, functions))
        if Level.OFFLOAD not in levels:
            yield None
            return
        recomputed = [layer for layer, level in zip(layers, levels, strict=True) if level is not Level.KEEP]
        # The last recomputed layer keeps its input on the device: while it runs, the input before it is fetched.
        keep_last = max(1, list(levels).count(Level.CHECKPOINT))
        yield stack.enter_context(offload_checkpoints(recomputed, keep_last=keep_last, **offload))


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
    """Memory of the layers of a model.

    Attributes:
        growth: per level that the model supports, one `Growth` per layer: bytes kept on the device.
        working: bytes that a layer's backward holds in addition to all kept ones, if that is known to be more than
            `WORKING_SHARE` says, e.g. for a stack of experts that is made dense.
    """

    growth: Mapping[Level, Sequence[Growth]]
    working: Growth = Growth()


@dataclass(frozen=True, slots=True)
class Plan:
    """A level for every layer.

    Attributes:
        levels: first layer to last.
        predicted: most bytes that are kept and in work at once, at the largest row.
        budget: bytes that are available for them.
    """

    levels: tuple[Level, ...]
    predicted: int
    budget: int

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
        return f"{describe(self.levels)}; predicted {self.predicted / GIB:.2f} GiB {fit} {self.budget / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans of one model for rows of one size.

    Attributes:
        costs: of the model.
        budget: bytes for what layers keep and for the layer in work.
        tokens: of the largest row.
        longest: tokens of its longest document.
    """

    costs: LayerCosts
    budget: int
    tokens: int
    longest: int

    @property
    def layers(self) -> int:
        return len(self.costs.growth[Level.KEEP])

    def _bytes(self, level: Level, index: int) -> int:
        return self.costs.growth[level][index].at(self.tokens, self.longest)

    def peak_bytes(self, levels: Sequence[Level]) -> int:
        """Return the most that layers hold at once: in backward, what those before keep and what one works on.

        The layers after it have freed theirs by then, so that kept ones at the end and recomputed ones at the beginning
        need their memory one after the other.
        """
        kept = peak = 0.0
        working = self.costs.working.at(self.tokens, self.longest)
        for index, level in enumerate(levels):
            whole = self._bytes(Level.KEEP, index)
            kept += self._bytes(level, index)
            work = max(whole * WORKING_SHARE, working)
            peak = max(peak, kept + work + (0 if level is Level.KEEP else whole))
            if levels[index : index + 2] == [Level.OFFLOAD, Level.KEEP]:
                kept += self._bytes(Level.CHECKPOINT, index)  # stays on the device, see `layer_levels`
        return round(peak)

    def plan(self, levels: Sequence[Level]) -> Plan:
        """Return the plan that has these levels."""
        return Plan(tuple(levels), self.peak_bytes(list(levels)), self.budget)

    def best(self) -> Plan:
        """Return the plan that keeps the most last layers: others checkpointed; offloaded only if that does not fit.

        If nothing fits, the plan of the least memory.
        """
        plan = self._mix(Level.KEEP, self.layers)
        for below in self._recomputing():
            for kept in range(self.layers, -1, -1):
                plan = self._mix(below, kept)
                if plan.fits:
                    return plan
        return plan

    def deeper(self, plan: Plan) -> Plan | None:
        """Return the plan after one that ran out of memory: half the kept layers, none, offload; None at the end."""
        first, kept = plan.levels[0], plan.levels.count(Level.KEEP)
        deeper = [level for level in self._recomputing() if level > first]
        if kept and (first is not Level.KEEP or deeper):
            return self._mix(deeper[0] if first is Level.KEEP else first, kept // 2)
        return self._mix(deeper[0], 0) if deeper else None

    def _recomputing(self) -> list[Level]:
        return [level for level in (Level.CHECKPOINT, Level.OFFLOAD) if level in self.costs.growth]

    def _mix(self, below: Level, kept: int) -> Plan:
        return self.plan([below] * (self.layers - kept) + [Level.KEEP] * kept)
