"""Bytes that each level of each layer keeps, and the cost of what it computes again, from runs of a few tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.checkpointing.counters import LiveBytes, ProductCounter, Products
from fastpack_trl.checkpointing.levels import Level, level_function
from fastpack_trl.checkpointing.plan import WORKING_SHARE, Growth, LayerCosts
from fastpack_trl.checkpointing.sample import LayerSample, kind_of
from fastpack_trl.model.aside import run_aside
from fastpack_trl.model.checkpoint_seam import layer_keywords
from fastpack_trl.model.sharded import local, units
from fastpack_trl.model.upstream import GradientCheckpointingLayer, tree_leaves

PROBE_TOKENS = (64, 128, 192)
"""Three lengths of one document: enough for a parabola."""
WORKING_TOKENS = (64, 1024)
"""Two that are far apart: what works most over few tokens, e.g. on weights, need not be what does over many."""

_CANNOT_RUN = (RuntimeError, TypeError, ValueError, NotImplementedError)
_POINTWISE_SHARE = 0.03  # of a step's products, where nothing was timed: element-wise work beside them

DecoderRun = Callable[[int], tuple[Tensor, Tensor]]
"""Runs the decoder on one document of that many tokens: (embeddings, a leaf; hidden states)."""


class SavedBytes:
    """Bytes of the distinct storages that one layer call keeps, without parameters and what all layers share.

    Args:
        known: storages that were counted, or that are none of a layer's.
        shared: storages that are none of this call's; may grow while it runs.
    """

    def __init__(self, known: set[int], shared: set[int]) -> None:
        self._seen = known
        self._shared = shared
        self._alive: list[Tensor] = []
        self.total = 0

    def see(self, tensor: Tensor) -> None:
        """Count `tensor`, once per storage."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        place = _storage(tensor)
        if place in self._seen or place in self._shared:
            return
        self._seen.add(place)
        self._alive.append(tensor.detach())  # no other tensor gets this address while we count
        self.total += tensor.untyped_storage().nbytes()

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor; keep it without its graph, which would keep it in turn: no backward breaks that circle."""
        self.see(tensor)
        return tensor.detach()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


class _Counted:
    """A layer's checkpoint function that counts what it keeps."""

    def __init__(self, level: Level, known: set[int]) -> None:
        self._level, self._known = level, known
        self._not_kept: set[int] = set()
        self.saved: SavedBytes | None = None
        self.like_its_input = True
        """Whether its result could be its input: one tensor of the same shape."""

    def see_parameters(self, layer: nn.Module, _args: Any) -> None:
        """Leave out the parameters of a layer that FSDP has gathered: a forward pre-hook, which runs after FSDP's."""
        self._not_kept.update(map(_storage, layer.parameters()))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        beside = tree_leaves([args[1:], kwargs, layer_keywords(function)])
        self._not_kept.update(_storage(tensor) for tensor in beside if isinstance(tensor, Tensor))
        saved = self.saved = SavedBytes(self._known, self._not_kept)
        inner = level_function(self._level, saved.see)
        with saved_tensors_hooks(saved.pack, _same):
            out = inner(function, *args, **kwargs)
        shapes = [getattr(tensor, "shape", None) for tensor in (*args[:1], out)]
        self.like_its_input = isinstance(out, Tensor) and shapes[0] == shapes[-1]
        return out


def _same(tensor: Tensor) -> Tensor:
    return tensor


def saved_bytes(
    model: nn.Module, layers: Sequence[GradientCheckpointingLayer], level: Level, run: DecoderRun, tokens: int
) -> list[int]:
    """Return the bytes that each layer keeps at `level` (`OFFLOAD`: as `CHECKPOINT`) for one document of `tokens`."""
    return _sizes(_counted(_storages_of(model), LayerSample.of_all(layers), level, run, tokens))


def _storages_of(model: nn.Module) -> frozenset[int]:
    return frozenset(_storage(local(tensor)) for tensor in (*model.parameters(), *model.buffers()))


def _counted(
    weights: frozenset[int], sample: LayerSample, level: Level, run: DecoderRun, tokens: int
) -> list[_Counted]:
    """Run the layers of `sample` and return what each counted; `weights` are storages that are no activations."""
    known = set(weights)
    counted = [_Counted(level, known) for _ in sample.taken]
    functions = iter(counted)
    with ExitStack() as stack:
        stack.enter_context(sample.run_with(lambda: next(functions)))
        for layer, function in zip(sample.of_taken(sample.layers), counted, strict=True):
            stack.callback(layer.register_forward_pre_hook(function.see_parameters).remove)
        run(tokens)
    return counted


def _sizes(counted: Sequence[_Counted]) -> list[int]:
    return [0 if function.saved is None else function.saved.total for function in counted]


def _sample(
    model: nn.Module, weights: frozenset[int], layers: Sequence[GradientCheckpointingLayer], run: DecoderRun
) -> LayerSample:
    """Return the layers that a trace may leave it at: those that keep alone what they keep among all.

    A model that FSDP 2 has parted runs all of its layers, whose hooks wait for each other.
    """
    every, few = LayerSample.of_all(layers), LayerSample(layers, [kind_of(layer) for layer in layers])
    if few.whole or units(model):
        return every
    whole = _counted(weights, every, Level.KEEP, run, PROBE_TOKENS[0])
    if not all(function.like_its_input for function in whole):
        return every
    try:
        alone = _counted(weights, few, Level.KEEP, run, PROBE_TOKENS[0])
    except (LookupError, AttributeError, *_CANNOT_RUN):  # a layer needs what another one leaves for it
        return every
    return few if few.stands(_sizes(alone), _sizes(whole)) else every


def trace_levels(
    model: nn.Module,
    layers: Sequence[GradientCheckpointingLayer],
    run: DecoderRun,
    *,
    timed_tokens: int | None = None,
    copy_seconds: Callable[[int], float] | None = None,
    levels: Sequence[Level] = tuple(Level),
    room: float = math.inf,
    ample: Callable[[Sequence[Growth]], bool] = lambda kept: False,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[LayerCosts, dict[Level, str]]:
    """Measure every level on a few tokens, in training mode, unseen by gradients, random states, buffers and hooks.

    Args:
        model: whose parameters are not activations.
        layers: its decoder layers.
        run: runs the decoder.
        timed_tokens: row on which passes are timed; None: costs are counted matrix products.
        copy_seconds: seconds to copy that many bytes between device and host; None: no offload.
        levels: those to measure, `KEEP` among them.
        room: bytes that a timed pass may take; its row is halved until it keeps no more.
        ample: returns whether there is so much memory for what `KEEP` keeps that no other level is likely to be needed:
            then nothing is timed, and of the others `CHECKPOINT` alone is measured, by its forward pass, in case it is
            all the same.
        together: makes a context around passes that are not timed; an exception leaves it in all processes or in none.

    Returns:
        The costs, and for each level that this model cannot run, why.
    """
    growth: dict[Level, Sequence[Growth]] = {}
    products: dict[Level, float] = {}
    seconds: dict[Level, float] = {}
    failed: dict[Level, str] = {}
    base: tuple[Products, float] | None = None
    much, needed = False, set(levels) - {Level.OFFLOAD}
    # A hook on a parameter would see each gradient that is asked for.
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad and not p._backward_hooks]
    with run_aside(model, training=True):
        weights = _storages_of(model)
        sample = _sample(model, weights, layers, run)
        for level in sorted(needed):
            if level not in needed:
                continue
            try:
                with together():
                    points = [
                        (tokens, _sizes(_counted(weights, sample, level, run, tokens))) for tokens in PROBE_TOKENS
                    ]
                few = [
                    Growth.through([(tokens, each[index]) for tokens, each in points])
                    for index in range(len(sample.taken))
                ]
                grown = sample.for_all(few)
                if level is Level.KEEP and ample(grown):
                    timed_tokens, much, needed = None, True, {Level.KEEP, Level.CHECKPOINT}
                if much and base is not None:
                    flops = Products(base[0].forward, base[0].total + base[0].forward)
                else:  # the level must also survive its backward pass
                    with together():
                        flops = _products(sample, level, run, parameters)
                if timed_tokens is not None and level is Level.KEEP:
                    timed_tokens = _fitting(sample, run, _within(room, few, timed_tokens), parameters)
                timed = None
                if timed_tokens is not None:
                    timed = _seconds(sample, level, run, timed_tokens, parameters)
            except _CANNOT_RUN as error:
                if level is Level.KEEP:
                    raise
                failed[level] = f"{type(error).__name__}: {error}"
                continue
            growth[level] = grown
            base = base or (flops, timed or 0.0)
            products[level] = max(0.0, flops.total - base[0].total) / base[0].total
            recompute = products[level] if timed is None else max(0.0, timed - base[1]) / len(sample.taken)
            if timed is None and level is not Level.KEEP:
                recompute += _POINTWISE_SHARE
            # Less kept is never faster: what a short run shows otherwise is noise.
            seconds[level] = max([recompute, *seconds.values()])
        working = Growth() if much or Level.CHECKPOINT not in growth else working_bytes(sample, run, growth, together)
    if copy_seconds is not None and Level.CHECKPOINT in growth:
        _add_offload(growth, products, seconds, copy_seconds, timed_tokens, base, len(sample.taken))
    return LayerCosts(growth, seconds, products, working), failed


def _add_offload(
    growth: dict[Level, Sequence[Growth]],
    products: dict[Level, float],
    seconds: dict[Level, float],
    copy_seconds: Callable[[int], float],
    timed_tokens: int | None,
    base: tuple[Products, float] | None,
    ran: int,
) -> None:
    """Add `OFFLOAD`, made from `CHECKPOINT`: no bytes kept, and what a copy takes longer than a layer's backward."""
    inputs = growth[Level.CHECKPOINT]
    growth[Level.OFFLOAD] = [Growth() for _ in inputs]
    products[Level.OFFLOAD] = products[Level.CHECKPOINT]
    exposed = 0.0
    if timed_tokens is not None and base is not None:
        layer = base[1] / ran * 2 / 3 + seconds[Level.CHECKPOINT]
        exposed = max(0.0, copy_seconds(inputs[-1].at(timed_tokens, timed_tokens)) - layer)
    seconds[Level.OFFLOAD] = (seconds[Level.CHECKPOINT] + exposed) * 1.02 or 1e-9


def _products(
    sample: LayerSample,
    level: Level,
    run: DecoderRun,
    parameters: Sequence[Tensor],
) -> Products:
    with sample.run_with(lambda: level_function(level)), ProductCounter() as counter:
        leaf, hidden = run(PROBE_TOKENS[0])
        forward = counter.total
        _backward(leaf, hidden, parameters)
    return Products(forward, counter.total)


def working_bytes(
    sample: LayerSample,
    run: DecoderRun,
    growth: Mapping[Level, Sequence[Growth]],
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Growth:
    """Return the bytes that a checkpointed pass works with beside all that is kept, gradients of weights apart.

    They are those of the last layer's backward, when all others have what they keep: gradients of activations, and
    weights that are made for one use. Where even these passes find no memory, none are known.
    """
    points = []
    for tokens in WORKING_TOKENS:
        with sample.run_with(lambda: level_function(Level.CHECKPOINT)), LiveBytes() as live:
            try:
                with together():
                    leaf, hidden = run(tokens)
                    torch.autograd.grad(hidden.float().sum(), leaf)
            except torch.OutOfMemoryError:
                return Growth()
            del leaf, hidden
        kept = sum(one.at(tokens, tokens) for one in sample.of_taken(growth[Level.CHECKPOINT]))
        points.append((tokens, live.peak - kept - growth[Level.KEEP][-1].at(tokens, tokens)))
    (a, fa), (b, fb) = points
    slope = max(0.0, (fb - fa) / (b - a))
    return Growth(max(0.0, fb - slope * b), slope)


def _backward(leaf: Tensor, hidden: Tensor, parameters: Sequence[Tensor]) -> None:
    """Run backward with the gradients of weights that a step computes; none is kept."""
    torch.autograd.grad(hidden.float().sum(), [leaf, *parameters], allow_unused=True)


def _seconds(
    sample: LayerSample,
    level: Level,
    run: DecoderRun,
    tokens: int,
    parameters: Sequence[Tensor],
) -> float:
    """Return the time of the faster of two passes, forward and backward, after one to warm up."""
    times = []
    with sample.run_with(lambda: level_function(level)):
        for _ in range(3):
            _synchronize()
            start = time.perf_counter()
            _backward(*run(tokens), parameters)
            _synchronize()
            times.append(time.perf_counter() - start)
    return min(times[1:])


def _within(room: float, kept: Sequence[Growth], tokens: int) -> int:
    """Return the largest of `tokens`, a half, a quarter, ... that keeps and works on at most `room` bytes."""

    def needed(count: int) -> float:
        sizes = [growth.at(count, count) for growth in kept]
        return sum(sizes) + (WORKING_SHARE - 1) * max(sizes)

    while tokens >= max(PROBE_TOKENS) and needed(tokens) > room:
        tokens //= 2
    return tokens


def _fitting(
    sample: LayerSample,
    run: DecoderRun,
    tokens: int,
    parameters: Sequence[Tensor],
) -> int | None:
    """Return the largest of `tokens`, a half, a quarter, ... that may keep everything; None below `PROBE_TOKENS`."""
    while tokens >= max(PROBE_TOKENS):
        try:
            _seconds(sample, Level.KEEP, run, tokens, parameters)
        except torch.OutOfMemoryError:
            tokens //= 2
        else:
            return tokens
    return None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_copy_seconds(device: torch.device, nbytes: int = 2**26) -> Callable[[int], float]:
    """Return the seconds per copy from pinned host memory, from one short measurement on `device`."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    rate = nbytes / min(times)
    return lambda count: count / rate
