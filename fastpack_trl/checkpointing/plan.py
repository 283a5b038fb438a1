"""Five levels of what a decoder layer keeps for its backward pass, and the plan that gives each layer one of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import CHECKPOINT, layer_keywords
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.upstream import GradientCheckpointingLayer, TorchDispatchMode, tree_leaves

WORKING_SHARE = 1.5
"""Of the activations of one layer: what its recompute and backward hold at once, gradients included."""

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm", "linear")
)
_ATTENTION = frozenset(
    f"aten::{name}"
    for name in (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    )
)  # fmt: skip


class Level(IntEnum):
    """Activations that a layer keeps, from most to least, and so from no recompute to most."""

    KEEP = 0
    """All that autograd saves."""
    POINTWISE = 1
    """The layer's input and the results of matrix products and attention; element-wise work is computed again."""
    SELECTIVE = 2
    """The layer's input and the results of attention, as TRL's selective checkpointing."""
    CHECKPOINT = 3
    """The layer's input."""
    OFFLOAD = 4
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


def _saves(level: Level, op: Any) -> bool:
    """Return whether `level` keeps the results of the operator `op`."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:  # what an operator writes into is not its own to keep
        return False
    name = str(schema.name)
    if name in _ATTENTION or "flash_attn" in name or (name.startswith("fastpack::") and name.endswith("_attention")):
        return level <= Level.SELECTIVE
    return level <= Level.POINTWISE and name in _PRODUCTS


def _policy(level: Level, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _saves(level, op) else CheckpointPolicy.PREFER_RECOMPUTE


class _Results(TorchDispatchMode):
    """Calls `seen` with every result that a level keeps."""

    def __init__(self, level: Level, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._level, self._seen = level, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _saves(self._level, func):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._seen(tensor)
        return out


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _contexts(level: Level, seen: Callable[[Tensor], None] | None) -> tuple[Any, Any]:
    forward, recompute = create_selective_checkpoint_contexts(functools.partial(_policy, level))
    return (forward if seen is None else _both(forward, _Results(level, seen))), recompute


def level_function(level: Level, seen: Callable[[Tensor], None] | None = None) -> Callable[..., Any]:
    """Return the checkpoint function of a layer at `level`; `OFFLOAD` has the one of `CHECKPOINT`.

    Args:
        seen: called with every tensor that is kept beside the layer's input, at the levels that keep some.
    """
    if level is Level.KEEP:
        return operator.call
    if level >= Level.CHECKPOINT:
        return functools.partial(checkpoint, use_reentrant=False)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=functools.partial(_contexts, level, seen))


class SavedBytes:
    """A layer's checkpoint function that counts the distinct storages which the layer keeps for backward.

    Args:
        known: addresses of storages that are counted already, or no activations; grows.
        level: of the layer.

    Attributes:
        total: bytes, without parameters and without what all layers share.
        like_its_input: whether the layer's result could be its input: one tensor of the same shape.
    """

    def __init__(self, known: set[int], level: Level = Level.KEEP) -> None:
        self.total = 0
        self.like_its_input = True
        self._known, self._level = known, level
        self._not_kept: set[int] = set()
        self._alive: list[Tensor] = []

    def see_parameters(self, layer: nn.Module, _args: Any) -> None:
        """Leave out the parameters of a layer that FSDP has gathered: a forward pre-hook, which runs after FSDP's."""
        self._not_kept.update(map(storage_of, layer.parameters()))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        beside = tree_leaves([args[1:], kwargs, layer_keywords(function)])
        self._not_kept.update(storage_of(tensor) for tensor in beside if isinstance(tensor, Tensor))
        with saved_tensors_hooks(self.pack, lambda tensor: tensor):
            out = level_function(self._level, self._see)(function, *args, **kwargs)
        shape = args[0].shape if args and isinstance(args[0], Tensor) else None
        self.like_its_input = isinstance(out, Tensor) and out.shape == shape
        return out

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor; keep it without its graph, which would keep it in turn: no backward breaks that circle."""
        self._see(tensor)
        return tensor.detach()

    def _see(self, tensor: Tensor) -> None:
        place = storage_of(tensor)
        if place in self._known or place in self._not_kept:
            return
        if tensor.layout is torch.strided and tensor.numel():
            self._known.add(place)
            self._alive.append(tensor.detach())  # no other tensor gets this address while we count
            self.total += tensor.untyped_storage().nbytes()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory of `tensor`."""
    return place_of(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def place_of(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage; of one without memory, as of a tensor on ``meta``, that of its description."""
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


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
    """Put every layer at its level while the context is open; yield the offload where a layer has that level.

    Args:
        layers: all decoder layers, first to last.
        levels: one per layer.
        offload: arguments of `offload_checkpoints`.
    """
    with ExitStack() as stack:
        functions = [(level_function(level), level is not Level.KEEP) for level in levels]
        stack.enter_context(layer_functions(layers, functions))
        taken = [layer for layer, level in zip(layers, levels, strict=True) if level >= Level.CHECKPOINT]
        if Level.OFFLOAD not in levels:
            yield None
            return
        # Layers that keep their input on the device ask for the input before theirs ahead of time.
        kept = sum(level is Level.CHECKPOINT for level in levels)
        yield stack.enter_context(offload_checkpoints(taken, keep_last=kept, **offload))


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
        products: per level, matrix-product operations of the recompute / all of a step without recompute.
        working: what a layer's backward holds beside all that it keeps, where that is known to be more than
            `WORKING_SHARE` says, e.g. for a stack of experts that is made dense.
    """

    growth: Mapping[Level, Sequence[Growth]]
    seconds: Mapping[Level, float]
    products: Mapping[Level, float]
    working: Growth = Growth()


@dataclass(frozen=True, slots=True)
class Plan:
    """A level for every layer.

    Attributes:
        levels: first layer to last.
        predicted: most bytes that are kept and in work at once, at the largest row.
        budget: bytes that there are for them.
        recompute: matrix-product operations done a second time / all of a step without recompute.
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


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans of one model for rows of one size.

    Attributes:
        budget: bytes for what layers keep and for the layer in work.
        tokens: of the largest row.
        longest: tokens of its longest document.
        deepest: levels past it are not used by `best` and `deeper`.
    """

    costs: LayerCosts
    budget: int
    tokens: int
    longest: int
    deepest: Level = Level.OFFLOAD

    @property
    def layers(self) -> int:
        return len(self.costs.growth[Level.KEEP])

    def kept_bytes(self, levels: Sequence[Level]) -> int:
        """Return the bytes kept on the device between forward and backward."""
        growth = self.costs.growth
        return sum(growth[level][index].at(self.tokens, self.longest) for index, level in enumerate(levels))

    def peak_bytes(self, levels: Sequence[Level]) -> int:
        """Return the most that layers hold at once: in backward, what those before keep and what one works on.

        The layers after it have freed theirs by then, so that kept ones at the end and recomputed ones at the beginning
        need their memory one after the other.
        """
        kept = peak = 0.0
        working = self.costs.working.at(self.tokens, self.longest)
        for index, level in enumerate(levels):
            whole = self.costs.growth[Level.KEEP][index].at(self.tokens, self.longest)
            kept += self.costs.growth[level][index].at(self.tokens, self.longest)
            work = max(whole * (WORKING_SHARE - 1), working)
            peak = max(peak, kept + work + (0 if level is Level.KEEP else whole))
        return round(peak)

    def plan(self, levels: Sequence[Level]) -> Plan:
        """Return the plan that has these levels."""
        recompute = sum(self.costs.products[level] for level in levels) / len(levels)
        return Plan(tuple(levels), self.peak_bytes(levels), self.budget, recompute)

    def best(self) -> Plan:
        """Return the plan of least recompute that fits, the last layers kept first; else the one of least memory.

        Two levels at most: with layers of one size the best mix for a given memory is, but for the rounding to whole
        layers, one of two neighbours on the lower convex hull of (bytes, seconds). So all pairs are tried.
        """
        levels, layers = self.worthwhile(), self.layers
        # Keeping everything is tried even where another level is as fast with less: nothing is recomputed, and the
        # layer in work takes less.
        mixes = [[Level.KEEP] * layers, [levels[0]] * layers]
        for index, below in enumerate(levels):
            mixes += [[below] * (layers - count) + [kept] * count for kept in levels[:index] for count in range(layers)]
        fitting = [plan for plan in map(self.plan, mixes) if plan.fits]
        if not fitting:
            return self.plan([levels[-1]] * layers)
        return min(fitting, key=lambda plan: (sum(map(self.costs.seconds.__getitem__, plan.levels)), plan.predicted))

    def worthwhile(self) -> list[Level]:
        """Return the levels that no other beats in both time and memory, most memory first."""
        seconds, layers = self.costs.seconds, self.layers
        size = {level: self.kept_bytes([level] * layers) for level in self.costs.growth if level <= self.deepest}
        found: list[Level] = []
        for level in sorted(size, key=lambda level: (seconds[level], size[level], -level)):
            if not found or size[level] < size[found[-1]]:
                found.append(level)
        return found

    def deeper(self, plan: Plan) -> Plan | None:
        """Return the next plan with less memory: layers above a level go down to it; None at the end."""
        for level in self.worthwhile():
            below = self.plan([max(level, own) for own in plan.levels])
            # Less at the peak, or at the end of forward, where the head has its own.
            if below.predicted < plan.predicted or self.kept_bytes(below.levels) < self.kept_bytes(plan.levels):
                return below
        return None
