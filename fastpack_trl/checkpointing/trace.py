"""Bytes that layers keep for backward, and work with in it, counted in passes over a few tokens.

Most layers of a model differ in their weights only, so one of each kind runs and stands for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.checkpointing.plan import Growth, LayerCosts, Level, layer_functions, level_function
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.checkpoint_seam import layer_keywords
from fastpack_trl.model.sharded import embeddings_put_in, fsdp_modules, head_sees_last, local
from fastpack_trl.model.upstream import GradientCheckpointingLayer, TorchDispatchMode, tree_leaves
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.run import Run

PROBE_TOKENS = (64, 128, 192)
"""Three lengths of one document: enough for a parabola."""
WORKING_TOKENS = (64, 1024)
"""Two that are far apart: what works most over few tokens, e.g. on weights, need not be what does over many."""

_TOLERANCE = 0.1  # of the bytes that layers of one kind keep: experts differ by who is routed where
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, AssertionError)

DecoderRun = Callable[[int], tuple[Tensor, Tensor]]
"""Runs the decoder on one document of that many tokens: (embeddings, a leaf; hidden states)."""


def decoder_run(run: Run) -> DecoderRun:
    """Return a function that runs the decoder on one document of so many tokens, as a training step does.

    On several documents if a table of positions ends before: GPT-2's has 1,024.

    Under FSDP 2 that is the whole model, with the logits of one token, in all processes at once.
    """
    model: Any = run.trainer.model_wrapped if run.is_fsdp2 else facts.backbones(run.model)[0]
    table, positions = facts.token_table(run.model), facts.learned_positions(run.model) or 2**62

    def decode(tokens: int) -> tuple[Tensor, Tensor]:
        lengths = [min(positions, tokens - start) for start in range(0, tokens, min(positions, tokens))]
        batch = PackedBatch.from_lengths(lengths).to(run.device)
        kwargs = to_transformers_kwargs(batch) | ({"packed_batch": batch} if run.packs else {}) | {"use_cache": False}
        ids = torch.arange(tokens, device=run.device)[None] % table.num_embeddings
        size = (1, tokens, table.embedding_dim)
        leaf = torch.randn(size, device=run.device, dtype=table.weight.dtype).requires_grad_()
        with embeddings_put_in(run.model, leaf), head_sees_last(run.model, 1), run.trainer.accelerator.autocast():
            out = model(input_ids=ids, **kwargs)
        return leaf, out.logits if run.is_fsdp2 else out[0]

    return decode


class SavedBytes:
    """A layer's checkpoint function that runs it unchecked, and counts the distinct storages kept for backward.

    Args:
        known: addresses of storages that are counted already, or no activations; grows.
        layer: its parameters are not counted, also those that FSDP has gathered.

    Attributes:
        total: bytes kept, without parameters and without what all layers share.
        inputs: bytes of the layer's input, which is all that a checkpointed layer keeps.
    """

    def __init__(self, known: set[int], layer: nn.Module) -> None:
        self.total = self.inputs = 0
        self._known, self._layer = known, layer
        self._not_kept: set[int] = set()
        self._alive: list[Tensor] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shared = tree_leaves([args[1:], kwargs, layer_keywords(function)])
        self._not_kept.update(storage_of(tensor) for tensor in shared if isinstance(tensor, Tensor))
        self.inputs = sum(storage.nbytes() for storage in _storages(args[:1]))
        with saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return function(*args, **kwargs)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor; keep it without its graph, which would keep it in turn: no backward breaks that circle."""
        if not self._alive:  # only now, inside of the layer, has FSDP gathered them
            self._not_kept.update(map(storage_of, self._layer.parameters()))
        place = storage_of(tensor)
        counted = place in self._known or place in self._not_kept
        if not counted and tensor.layout is torch.strided and tensor.numel():
            self._known.add(place)
            self._alive.append(tensor.detach())  # no other tensor gets this address while we count
            self.total += tensor.untyped_storage().nbytes()
        return tensor.detach()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory of `tensor`."""
    return _place(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _place(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage; of one without memory, as of a tensor on ``meta``, that of its description."""
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and value.untyped_storage().nbytes():
            yield value.untyped_storage()


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operators make, from their birth to their death.

    The allocator's own peak would be rounded to blocks: over a few tokens that is more than what a token adds.

    Attributes:
        peak: the most that was alive at once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_place(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            place = _place(storage)
            if place not in given and place not in self._alive:
                self._alive[place] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, place)
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def kind_of(layer: nn.Module) -> Any:
    """Return what makes a layer another kind of layer: its modules, their windows, shapes and types of its tensors."""
    modules = list(layer.modules())
    attentions = [module for module in modules if hasattr(module, "config") and hasattr(module, "layer_idx")]
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    return tuple(map(type, modules)), tuple(map(facts.window_of, attentions)), tuple(shapes)


def _pass_on(_function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


class Passes:
    """Passes of the decoder on a few tokens.

    Args:
        model: its parameters and buffers are not activations.
        layers: its decoder layers.
        run: runs the decoder.
        kinds: of the layers: the last layer of each kind runs and stands for the others, which pass their input on.
            None: all run.

    Attributes:
        taken: indices of the layers that run.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[GradientCheckpointingLayer],
        run: DecoderRun,
        kinds: Sequence[Any] | None = None,
    ) -> None:
        self._layers, self._run = layers, run
        kinds = range(len(layers)) if kinds is None else kinds
        last = {kind: index for index, kind in enumerate(kinds)}
        self.taken = sorted(last.values())
        self._stand_ins = [last[kind] for kind in kinds]
        self._weights = {storage_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}

    def _with(self, functions: Mapping[int, Callable[..., Any]]) -> AbstractContextManager[None]:
        """Give these checkpoint functions to the layers that run."""
        count = range(len(self._layers))
        return layer_functions(self._layers, [(functions.get(index, _pass_on), True) for index in count])

    def saved(self, tokens: int) -> list[SavedBytes]:
        """Return what each layer of the model keeps for one document."""
        known = set(self._weights)
        counters = {index: SavedBytes(known, self._layers[index]) for index in self.taken}
        with self._with(counters):
            self._run(tokens)
        return [counters[index] for index in self._stand_ins]

    def growth(self) -> dict[Level, list[Growth]]:
        """Return what each layer of the model keeps at each level on the device, for documents of any length."""
        layers = list(zip(*map(self.saved, PROBE_TOKENS), strict=True))

        def through(sizes: Sequence[int]) -> Growth:
            return Growth.through(list(zip(PROBE_TOKENS, sizes, strict=True)))

        return {
            Level.KEEP: [through([saved.total for saved in each]) for each in layers],
            Level.CHECKPOINT: [through([saved.inputs for saved in each]) for each in layers],
        }

    def working(self, growth: Mapping[Level, Sequence[Growth]]) -> Growth:
        """Return the bytes that a checkpointed pass needs on top of all kept ones, without gradients of weights.

        The last layer's backward has them, when all others have what they keep: gradients of activations, and weights
        that are made for one use.
        """
        peaks = []
        for tokens in WORKING_TOKENS:
            with self._with(dict.fromkeys(self.taken, level_function(Level.CHECKPOINT))), LiveBytes() as live:
                leaf, hidden = self._run(tokens)
                torch.autograd.grad(hidden.float().sum(), leaf)
                del leaf, hidden
            kept = [*(growth[Level.CHECKPOINT][index] for index in self.taken), growth[Level.KEEP][-1]]
            peaks.append(live.peak - sum(each.at(tokens, tokens) for each in kept))
        (few, many), (at_few, at_many) = WORKING_TOKENS, peaks
        slope = max(0.0, (at_many - at_few) / (many - few))
        return Growth(max(0.0, at_many - slope * many), slope)


def _sampled(model: nn.Module, layers: Sequence[GradientCheckpointingLayer], run: DecoderRun) -> Passes:
    """Return passes of one layer per kind if these keep alone what all keep in a pass of all, else of all layers.

    A model that FSDP 2 has sharded runs all of its layers, whose hooks wait for each other.
    """
    whole = Passes(model, layers, run)
    few = Passes(model, layers, run, [kind_of(layer) for layer in layers])
    if few.taken == whole.taken or fsdp_modules(model):
        return whole
    every = whole.saved(PROBE_TOKENS[0])
    with suppress(*facts.UNREADABLE):  # alone, a layer may miss what another one leaves for it
        alone = few.saved(PROBE_TOKENS[0])
        if all(abs(a.total - b.total) <= _TOLERANCE * b.total for a, b in zip(alone, every, strict=True)):
            return few
    return whole


def trace_levels(
    model: nn.Module,
    layers: Sequence[GradientCheckpointingLayer],
    run: DecoderRun,
    *,
    offload: bool = False,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[LayerCosts, str]:
    """Measure every level on a few tokens, in training mode, unseen by gradients, random states, buffers and hooks.

    Args:
        model, layers, run: see `Passes`.
        offload: whether layer inputs may go to host memory.
        together: makes a context around passes; an exception leaves it in all processes or in none.

    Returns:
        The costs, and why the layers cannot be checkpointed; empty if they can.
    """
    working, failed = Growth(), ""
    with isolated_run(model, training=True):
        with together():
            passes = _sampled(model, layers, run)
            growth = passes.growth()
        try:
            with together():
                working = passes.working(growth)
        except _CANNOT_RUN as error:
            # Out of memory, in this process or in another, says nothing but that the work is not known.
            failed = f"{type(error).__name__}: {error}"
            failed = "" if "OutOfMemoryError" in failed else failed
    if failed:
        del growth[Level.CHECKPOINT]
    elif offload:
        growth[Level.OFFLOAD] = [Growth()] * len(layers)
    return LayerCosts(growth, working), failed
