"""Three memory levels of a decoder layer for its backward pass, and the plan that gives each layer one of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import Any

from torch.utils.checkpoint import checkpoint

from fastpack_trl.checkpointing.offload import Mode, Offload, offload_checkpoints
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import CHECKPOINT
from fastpack_trl.model.upstream import GradientCheckpointingLayer

WORKING_SHARE, EXPERTS_SHARE = 0.4, 1.4
"""Share of what a layer keeps that its backward pass holds in addition: gradients of activations.

In an MLP the gradients of product, gate and up at most: in Qwen3-8B 37 of the 90 thousand numbers that a layer keeps
per token. Matmuls of experts save little and make the rest again, with its gradients: as counted in gpt-oss.
"""


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


@contextmanager
def layer_functions(
    layers: Sequence[GradientCheckpointingLayer], functions: Sequence[Callable[..., Any] | None]
) -> Iterator[None]:
    """Give each layer its own checkpoint function; None: it is not checkpointed. All is restored afterwards."""
    with ExitStack() as stack:
        for layer, function in zip(layers, functions, strict=True):
            for inner in layer.modules():  # one inside of a layer is recomputed with it
                if isinstance(inner, GradientCheckpointingLayer):
                    enabled = inner is layer and function is not None
                    stack.enter_context(patch_attribute(inner, "gradient_checkpointing", enabled))
            stack.enter_context(patch_attribute(layer, CHECKPOINT, function or operator.call))
        yield


@contextmanager
def layer_levels(
    layers: Sequence[GradientCheckpointingLayer], levels: Sequence[Level], mode: Mode = "double_buffer"
) -> Iterator[Offload | None]:
    """Put all decoder layers, first to last, at their levels while the context is open; yield the offload, if any."""
    recompute = functools.partial(checkpoint, use_reentrant=False)
    recomputed = [layer for layer, level in zip(layers, levels, strict=True) if level is not Level.KEEP]
    # The last recomputed layer keeps its input on the device: while it runs, the input before it is fetched.
    keep_last = max(1, list(levels).count(Level.CHECKPOINT))
    offloads = Level.OFFLOAD in levels
    offload = offload_checkpoints(recomputed, mode, keep_last=keep_last) if offloads else nullcontext()
    with layer_functions(layers, [None if level is Level.KEEP else recompute for level in levels]), offload as made:
        yield made


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes that a layer keeps for backward: ``constant + per_token * tokens + per_pair * tokens * longest``.

    Attributes:
        constant: e.g. casts of weights, and padding of experts to whole tiles.
        per_pair: per token and token of the longest document: attention that keeps its scores.
        per_input: bytes of its input per token: all that a checkpointed layer keeps.
        working: share of what it keeps that its backward pass holds in addition.
    """

    constant: float
    per_token: float
    per_pair: float
    per_input: float
    working: float = WORKING_SHARE

    @classmethod
    def through(cls, points: Sequence[tuple[int, int]], per_input: float, working: float = WORKING_SHARE) -> LayerCost:
        """Return the parabola through three measurements (tokens of one document, bytes)."""
        (a, fa), (b, fb), (c, fc) = points
        slope, next_slope = (fb - fa) / (b - a), (fc - fb) / (c - b)
        pair = (next_slope - slope) / (c - a)
        token = slope - pair * (a + b)
        return cls(fa - token * a - pair * a * a, token, pair, per_input, working)

    def at(self, tokens: int, longest: int) -> int:
        return max(0, round(self.constant + self.per_token * tokens + self.per_pair * tokens * longest))


@dataclass(frozen=True, slots=True)
class Plan:
    """The last layers keep everything, those before have one other level: for rows of one size.

    Attributes:
        kept, inputs, working: bytes of each layer for the largest row: what it keeps whole and checkpointed, and what
            its backward pass holds in addition.
        budget: bytes for all of these.
        count: number of last layers that keep everything.
        below: level of the layers before.
        can_offload: layer inputs may go to host memory.
    """

    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    working: tuple[int, ...]
    budget: int
    count: int
    below: Level = Level.CHECKPOINT
    can_offload: bool = True

    @classmethod
    def keeping_all(
        cls, costs: Sequence[LayerCost], tokens: int, longest: int, budget: int, dense: int, can_offload: bool = True
    ) -> Plan:
        """Return the plan that recomputes nothing, for a row of `tokens` with documents of up to `longest` tokens.

        Args:
            dense: bytes of the largest frozen weight that is made dense for one use.
        """
        kept = tuple(cost.at(tokens, longest) for cost in costs)
        inputs = tuple(round(cost.per_input * tokens) for cost in costs)
        working = tuple(round(whole * cost.working) + dense for whole, cost in zip(kept, costs, strict=True))
        return cls(kept, inputs, working, budget, len(kept), can_offload=can_offload)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the level of each layer, first to last."""
        return (self.below,) * (len(self.kept) - self.count) + (Level.KEEP,) * self.count

    @property
    def predicted(self) -> int:
        """Return the most that layers hold at once: in backward, what those before keep and what one works on.

        The layers after it have freed theirs by then, so that kept ones at the end and recomputed ones at the beginning
        need their memory one after the other. An input that is fetched meanwhile is not counted: recorded peaks are
        rather below the prediction without it.
        """
        held, peak, levels = 0, 0, self.levels
        for index, level in enumerate(levels):
            whole, own = self.kept[index], self.inputs[index]
            held += {Level.KEEP: whole, Level.CHECKPOINT: own, Level.OFFLOAD: 0}[level]
            peak = max(peak, held + self.working[index] + (0 if level is Level.KEEP else whole))
            if levels[index : index + 2] == (Level.OFFLOAD, Level.KEEP):
                held += own  # stays on the device, see `layer_levels`
        return peak

    @property
    def fits(self) -> bool:
        return self.predicted <= self.budget

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is recomputed."""
        return self.count == len(self.kept)

    @property
    def left(self) -> int:
        """Return the bytes of the budget that no activation needs."""
        return max(0, self.budget - self.predicted)

    def __str__(self) -> str:
        fit = "of" if self.fits else "over the"
        return f"{describe(self.levels)}; predicted {self.predicted / GIB:.2f} GiB {fit} {self.budget / GIB:.2f} GiB"

    def last_kept(self, count: int, below: Level = Level.CHECKPOINT) -> Plan:
        """Return the plan that keeps the last `count` layers and has the others at `below`."""
        return replace(self, count=count, below=below)

    def best(self) -> Plan:
        """Return the plan that keeps the activations of as many last layers as fit.

        Checkpoint the others, or offload them if that does not fit. If nothing fits, return the plan with the least
        memory.
        """
        below = (Level.CHECKPOINT, Level.OFFLOAD)[: 1 + self.can_offload]
        plans = (self.last_kept(count, level) for level in below for count in range(len(self.kept), -1, -1))
        return next((plan for plan in plans if plan.fits), self.last_kept(0, below[-1]))

    def deeper(self) -> Plan | None:
        """Return the plan after this one ran out of memory: half the kept layers, none, offload; None at the end."""
        if self.count:
            return self.last_kept(self.count // 2, self.below)
        return self.last_kept(0, Level.OFFLOAD) if self.can_offload and self.below is Level.CHECKPOINT else None
