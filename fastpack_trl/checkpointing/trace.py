"""Bytes that each layer keeps at each level, from passes over a few tokens.

Most layers of a model differ in their weights only, so a few of them run and stand for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastpack_trl.checkpointing.plan import (
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

_TOLERANCE = 0.1  # of the bytes that layers of one kind keep: experts differ by who is routed where
_CANNOT_RUN = (RuntimeError, TypeError, ValueError)

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


def sample_layers(kinds: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Choose layers that stand for all, the last of each kind: equal kinds do the same on other weights.

    Returns:
        Indices of those that run, first to last; and for each layer of the model the place in that list of the one that
        stands for it.
    """
    last = {kind: index for index, kind in enumerate(kinds)}
    taken = sorted(last.values())
    return taken, [taken.index(last[kind]) for kind in kinds]


def _hand_on(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


class Passes:
    """Passes of the decoder on a few tokens.

    Args:
        model: whose parameters and buffers are not activations.
        layers: its decoder layers.
        run: runs the decoder.
        together: makes a context around passes; an exception leaves it in all processes or in none.
        kinds: of the layers, of which `sample_layers` run, and the others hand on their input; None: all run.

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
    ) -> None:
        self._model, self._layers, self._run, self._together = model, layers, run, together
        indices = list(range(len(layers)))
        self.taken, self._stands_in = (indices, indices) if kinds is None else sample_layers(kinds)
        self._storages = {storage_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}

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


def trace_levels(
    model: nn.Module,
    layers: Sequence[GradientCheckpointingLayer],
    run: DecoderRun,
    *,
    offload: bool = False,
    ample: Callable[[Sequence[Growth]], bool] = lambda kept: False,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[LayerCosts, str]:
    """Measure every level on a few tokens, in training mode, unseen by gradients, random states, buffers and hooks.

    Args:
        model, layers, run, together: see `Passes`.
        offload: whether layer inputs may go to host memory.
        ample: returns whether there is so much memory for what `KEEP` keeps that no other level is likely to be needed:
            then `CHECKPOINT` is measured by its forward pass alone.

    Returns:
        The costs, and why the layers cannot be checkpointed; empty if they can.
    """
    working, failed = Growth(), ""
    with isolated_run(model, training=True):
        passes = Passes(model, layers, run, together).sampled()
        keep = passes.for_all(passes.growth(Level.KEEP))
        growth: dict[Level, Sequence[Growth]] = {Level.KEEP: keep}
        try:
            inputs = passes.for_all(passes.growth(Level.CHECKPOINT))
            if not ample(keep):
                working = passes.working(keep[-1], inputs)
        except _CANNOT_RUN as error:
            failed = f"{type(error).__name__}: {error}"
        else:
            growth[Level.CHECKPOINT] = inputs
            if offload:
                growth[Level.OFFLOAD] = [Growth()] * len(inputs)
    return LayerCosts(growth, working), failed
