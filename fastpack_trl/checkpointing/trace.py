"""Bytes that each level of each layer keeps, and the cost of what it computes again, from runs of a few tokens.

Most layers of a model differ in their weights only, so a few of them run and stand for all.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fastpack_trl.checkpointing.plan import (
    WORKING_SHARE,
    Growth,
    LayerCosts,
    Level,
    SavedBytes,
    layer_functions,
    level_function,
    place_of,
    storage_of,
)
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.sharded import embeddings_put_in, fsdp_modules, head_sees_last, local
from fastpack_trl.model.upstream import GradientCheckpointingLayer, TorchDispatchMode, tree_leaves
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.run import Run

PROBE_TOKENS = (64, 128, 192)
"""Three lengths of one document: enough for a parabola."""
WORKING_TOKENS = (64, 1024)
"""Two that are far apart: what works most over few tokens, e.g. on weights, need not be what does over many."""
SAMPLED = 4
"""Layers that are enough; more only where there are more kinds of them."""

_TOLERANCE = 0.1  # of the bytes that layers of one kind keep: experts differ by who is routed where
_CANNOT_RUN = (RuntimeError, TypeError, ValueError)
_POINTWISE_SHARE = 0.03  # of a step's products, where nothing was timed: element-wise work beside them

_Value = TypeVar("_Value")
DecoderRun = Callable[[int], tuple[Tensor, Tensor]]
"""Runs the decoder on one document of that many tokens: (embeddings, a leaf; hidden states)."""


def decoder_run(run: Run) -> DecoderRun:
    """Return a function that runs the decoder on one document of so many tokens, as a training step does.

    On several where a table of positions ends before: GPT-2's has 1,024.

    Under FSDP 2 that is the whole model, with the logits of one token, in all processes at once.
    """
    model, embedding = facts.backbones(run.model)[0], facts.text_model(run.model).get_input_embeddings()
    table = facts.token_table(run.model)
    packed, device, accelerator = run.packs, run.device, run.trainer.accelerator
    positions = facts.learned_positions(run.model) or 2**62

    def decode(tokens: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(tokens, device=device)[None] % table.num_embeddings
        lengths = [min(positions, tokens - start) for start in range(0, tokens, min(positions, tokens))]
        batch = PackedBatch.from_lengths(lengths).to(device)
        kwargs = to_transformers_kwargs(batch) | ({"packed_batch": batch} if packed else {}) | {"use_cache": False}
        if run.is_fsdp2:
            leaf = torch.randn(1, tokens, table.embedding_dim, device=device).requires_grad_()
            with embeddings_put_in(run.model, leaf), head_sees_last(run.model, 1), accelerator.autocast():
                return leaf, run.trainer.model_wrapped(input_ids=ids, **kwargs).logits
        leaf = embedding(ids).detach().requires_grad_()
        with accelerator.autocast():
            out = model(inputs_embeds=leaf.clone(), **kwargs, **facts.beside_embeddings(run.model, ids))
        return leaf, out[0]

    return decode


class ProductCounter(TorchDispatchMode):
    """Adds up operations by torch's formulas. `FlopCounterMode` also follows the modules, in three times the time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_GROUPED_HEADS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        out = func(*args, **keywords)
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.total += formula(*args, **keywords, out_val=out)
        return out


def _repeated(formula: Callable[..., int], first: int) -> Callable[..., int]:
    """Let a formula of attention see keys and values with as many heads as queries: torch 2.11 refuses fewer."""

    def flops(*shapes: Any, **_: Any) -> int:
        query, key, value = shapes[first : first + 3]
        heads = query[1]
        return formula(*shapes[:first], query, (key[0], heads, *key[2:]), (value[0], heads, *value[2:]))

    return flops


_GROUPED_HEADS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{end}"): formula
    for kind in ("efficient", "flash", "cudnn")
    for end, formula in (("", _repeated(sdpa_flop_count, 0)), ("_backward", _repeated(sdpa_backward_flop_count, 1)))
}


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operators make, from their birth to their death.

    The allocator's own peak would be rounded to blocks: over a few tokens that is more than what a token adds.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most that was alive at once."""
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {place_of(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            place = place_of(storage)
            if place not in given and place not in self._alive:
                self._alive[place] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, place)
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and value.untyped_storage().nbytes():
            yield value.untyped_storage()


def kind_of(layer: nn.Module) -> Any:
    """Return what makes a layer another kind of layer: its modules, their windows, shapes and types of its tensors.

    Whether layers of one kind keep as much, a run says: `Passes.sampled`.
    """
    modules = list(layer.modules())
    attentions = [module for module in modules if hasattr(module, "config") and hasattr(module, "layer_idx")]
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    return tuple(map(type, modules)), tuple(map(facts.window_of, attentions)), tuple(shapes)


def sample_layers(kinds: Sequence[Any], size: int = SAMPLED) -> tuple[list[int], list[int]]:
    """Choose layers that stand for all: layers of equal kinds do the same on other weights.

    Returns:
        Indices of those that run, first to last, the model's last one among them; and for each layer of the model the
        place in that list of the one that stands for it.
    """
    groups: dict[Any, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    # In the proportions of the model, since passes are timed. Last ones: a layer's backward is measured where all
    # others have what they keep.
    shares = {kind: max(1, round(size * len(group) / len(kinds))) for kind, group in groups.items()}
    taken = sorted(index for kind, group in groups.items() for index in group[-shares[kind] :])
    return taken, [taken.index(index if index in taken else groups[kind][-1]) for index, kind in enumerate(kinds)]


def _hand_on(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


class Passes:
    """Passes of the decoder on a few tokens.

    Args:
        model: whose parameters and buffers are not activations.
        layers: its decoder layers.
        run: runs the decoder.
        together: makes a context around passes that are not timed; an exception leaves it in all processes or in none.
        kinds: of the layers, of which `sample_layers` run, and the others hand on their input; None: all run.
        sampled: layers that run at least, with `kinds`.

    Attributes:
        taken: indices of the layers that run.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[GradientCheckpointingLayer],
        run: DecoderRun,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        kinds: Sequence[Any] | None = None,
        sampled: int = SAMPLED,
    ) -> None:
        self._model, self._layers, self._run, self._together = model, layers, run, together
        indices = list(range(len(layers)))
        self.taken, self._stands_in = (indices, indices) if kinds is None else sample_layers(kinds, sampled)
        self._storages = {storage_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}
        # A hook on a parameter would see each gradient that is asked for.
        self._parameters = [
            p for layer in layers for p in layer.parameters() if p.requires_grad and not p._backward_hooks
        ]

    def sampled(self) -> Passes:
        """Return the passes that a trace may leave it at: of a few layers, where these keep alone what all keep.

        A model that FSDP 2 has sharded runs all of its layers, whose hooks wait for each other.
        """
        few = Passes(self._model, self._layers, self._run, self._together, [kind_of(layer) for layer in self._layers])
        if few.taken == self.taken or fsdp_modules(self._model):
            return self
        whole = self._counted(Level.KEEP, PROBE_TOKENS[0])
        if all(layer.like_its_input for layer in whole):
            # Alone, a layer may miss what another one leaves for it.
            with suppress(*facts.UNREADABLE):
                alone = few.for_all(few.kept(Level.KEEP, PROBE_TOKENS[0]))
                if all(abs(a - b.total) <= _TOLERANCE * b.total for a, b in zip(alone, whole, strict=True)):
                    return few
        return self

    def for_all(self, per_taken: Sequence[_Value]) -> list[_Value]:
        """Return a value per layer of the model, of one per layer that runs."""
        return [per_taken[place] for place in self._stands_in]

    def _with(self, functions: Sequence[Callable[..., Any]]) -> AbstractContextManager[None]:
        """Give the layers that run these checkpoint functions."""
        own = dict(zip(self.taken, functions, strict=True))
        return layer_functions(self._layers, [(own.get(index, _hand_on), True) for index in range(len(self._layers))])

    def _at(self, level: Level) -> AbstractContextManager[None]:
        return self._with([level_function(level)] * len(self.taken))

    def _counted(self, level: Level, tokens: int) -> list[SavedBytes]:
        known = set(self._storages)
        counted = [SavedBytes(known, level) for _ in self.taken]
        with ExitStack() as stack:
            stack.enter_context(self._with(counted))
            for index, function in zip(self.taken, counted, strict=True):
                stack.callback(self._layers[index].register_forward_pre_hook(function.see_parameters).remove)
            self._run(tokens)
        return counted

    def kept(self, level: Level, tokens: int) -> list[int]:
        """Return the bytes that each layer keeps at `level` (`OFFLOAD`: as `CHECKPOINT`) for one document."""
        return [function.total for function in self._counted(level, tokens)]

    def growth(self, level: Level) -> list[Growth]:
        """Return the same for documents of any length."""
        with self._together():
            points = [self.kept(level, tokens) for tokens in PROBE_TOKENS]
        return [Growth.through(list(zip(PROBE_TOKENS, each, strict=True))) for each in zip(*points, strict=True)]

    def products(self, level: Level) -> tuple[float, float]:
        """Return the matrix-product operations of forward, and of the whole pass with what backward computes again."""
        with self._together(), self._at(level), ProductCounter() as counter:
            leaf, hidden = self._run(PROBE_TOKENS[0])
            forward = counter.total
            self._backward(leaf, hidden)
        return forward, counter.total

    def seconds(self, level: Level, tokens: int) -> float:
        """Return the time of the faster of two passes, forward and backward, after one to warm up."""
        times = []
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        with self._at(level):
            for _ in range(3):
                synchronize()
                start = time.perf_counter()
                self._backward(*self._run(tokens))
                synchronize()
                times.append(time.perf_counter() - start)
        return min(times[1:])

    def longest(self, tokens: int, room: float, kept: Sequence[Growth]) -> tuple[int, float] | None:
        """Return tokens and seconds of `KEEP` on the first of `tokens`, a half, ... that `room` and the device hold."""
        while tokens >= max(PROBE_TOKENS):
            sizes = [growth.at(tokens, tokens) for growth in kept]
            if sum(sizes) + (WORKING_SHARE - 1) * max(sizes) <= room:
                with suppress(torch.OutOfMemoryError):
                    return tokens, self.seconds(Level.KEEP, tokens)
            tokens //= 2
        return None

    def working(self, keep: Growth, inputs: Sequence[Growth]) -> Growth:
        """Return the bytes that a checkpointed pass works with beside all that is kept, gradients of weights apart.

        The last layer's backward has them, when all others have what they keep: gradients of activations, and weights
        that are made for one use. Where even these passes find no memory, none are known.

        Args:
            keep: growth of the last layer at `KEEP`.
            inputs: growth of each layer at `CHECKPOINT`.
        """
        found = []
        for tokens in WORKING_TOKENS:
            with self._at(Level.CHECKPOINT), LiveBytes() as live:
                try:
                    with self._together():
                        leaf, hidden = self._run(tokens)
                        torch.autograd.grad(hidden.float().sum(), leaf)
                except torch.OutOfMemoryError:
                    return Growth()
                del leaf, hidden
            kept = sum(inputs[index].at(tokens, tokens) for index in self.taken)
            found.append(live.peak - kept - keep.at(tokens, tokens))
        (few, many), (at_few, at_many) = WORKING_TOKENS, found
        slope = max(0.0, (at_many - at_few) / (many - few))
        return Growth(max(0.0, at_many - slope * many), slope)

    def _backward(self, leaf: Tensor, hidden: Tensor) -> None:
        """Run backward with the gradients of weights that a step computes; none is kept."""
        torch.autograd.grad(hidden.float().sum(), [leaf, *self._parameters], allow_unused=True)


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
        model, layers, run, together: see `Passes`.
        timed_tokens: row on which passes are timed; None: costs are counted matrix products.
        copy_seconds: seconds to copy that many bytes between device and host; None: no offload.
        levels: those to measure, `KEEP` among them.
        room: bytes that a timed pass may take; its row is halved until it keeps no more.
        ample: returns whether there is so much memory for what `KEEP` keeps that no other level is likely to be needed:
            then nothing is timed, and of the others `CHECKPOINT` alone is measured, by its forward pass, in case it is
            all the same.

    Returns:
        The costs, and for each level that this model cannot run, why.
    """
    failed: dict[Level, str] = {}
    with isolated_run(model, training=True):
        passes = Passes(model, layers, run, together).sampled()
        keep = passes.growth(Level.KEEP)
        growth: dict[Level, Sequence[Growth]] = {Level.KEEP: passes.for_all(keep)}
        products, seconds = {Level.KEEP: 0.0}, {Level.KEEP: 0.0}
        is_ample = ample(growth[Level.KEEP])
        forward, whole = passes.products(Level.KEEP)
        timed = None if timed_tokens is None or is_ample else passes.longest(timed_tokens, room, keep)
        others = {Level.CHECKPOINT} if is_ample else {*levels} - {Level.KEEP, Level.OFFLOAD}
        for level in sorted(others):
            try:
                kept = passes.growth(level)
                # Where it may be needed, the level must also survive its backward pass.
                total = whole + forward if is_ample else passes.products(level)[1]
                slower = 0.0 if timed is None else passes.seconds(level, timed[0]) - timed[1]
            except _CANNOT_RUN as error:
                failed[level] = f"{type(error).__name__}: {error}"
                continue
            growth[level] = passes.for_all(kept)
            products[level] = max(0.0, total - whole) / whole
            recompute = products[level] + _POINTWISE_SHARE if timed is None else slower / len(passes.taken)
            # Less kept is never faster: what a short run shows otherwise is noise.
            seconds[level] = max(recompute, *seconds.values())
        inputs = growth.get(Level.CHECKPOINT)
        working = Growth() if is_ample or inputs is None else passes.working(growth[Level.KEEP][-1], inputs)
    if copy_seconds is not None and inputs is not None:
        # As `CHECKPOINT`, but for what a copy takes longer than a layer's backward.
        growth[Level.OFFLOAD], products[Level.OFFLOAD] = [Growth()] * len(inputs), products[Level.CHECKPOINT]
        exposed, recompute = 0.0, seconds[Level.CHECKPOINT]
        if timed is not None:
            tokens, took = timed
            backward = took / len(passes.taken) * 2 / 3 + recompute
            exposed = max(0.0, copy_seconds(inputs[-1].at(tokens, tokens)) - backward)
        seconds[Level.OFFLOAD] = (recompute + exposed) * 1.02 or 1e-9
    return LayerCosts(growth, seconds, products, working), failed
