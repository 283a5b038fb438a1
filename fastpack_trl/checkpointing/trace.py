"""Bytes that layers keep for backward, counted in forward passes over a few tokens.

Nothing is kept of such a pass, so that it needs the memory of one layer. A run has all layers counted; `doctor`, whose
tensors have no memory, one of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.checkpointing.plan import EXPERTS_SHARE, WORKING_SHARE, LayerCost, layer_functions
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.checkpoint_seam import layer_keywords
from fastpack_trl.model.sharded import embeddings_put_in, head_sees_last, local
from fastpack_trl.model.upstream import GradientCheckpointingLayer, tree_leaves
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

_PROBE_TOKENS = (64, 128, 192)
"""Three lengths of one document: enough for a parabola."""


def probe_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the lengths of the documents over which `layer_costs` counts; shorter ones if positions end earlier."""
    positions = getattr(facts.text_model(model).config.get_text_config(), "max_position_embeddings", None)
    longest = min(_PROBE_TOKENS[-1], positions or _PROBE_TOKENS[-1])
    return tuple(2 * (tokens * longest // (2 * _PROBE_TOKENS[-1])) for tokens in _PROBE_TOKENS)  # two even documents


def layer_costs(
    model: nn.Module,
    layers: Sequence[GradientCheckpointingLayer],
    batches: Mapping[int, PackedBatch],
    *,
    decoder: Any = None,
    packs: bool = True,
    stand_ins: Sequence[int] | None = None,
) -> list[LayerCost]:
    """Return what each layer keeps, from a pass over each batch, unseen by gradients, random states and hooks.

    Args:
        model: its parameters and buffers are not activations.
        layers: its decoder layers.
        batches: by their tokens, on the device of the model, of `probe_tokens`.
        decoder: what runs; None: the model without its head.
        packs: layers are given the `PackedBatch`.
        stand_ins: for each layer the one that is counted for it; the others pass their input on. None: all run.
    """
    decoder = facts.backbones(model)[0] if decoder is None else decoder
    stand_ins = range(len(layers)) if stand_ins is None else stand_ins
    weights = {storage_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}
    points: dict[int, list[tuple[int, int]]] = {index: [] for index in stand_ins}
    per_input = dict.fromkeys(stand_ins, 0.0)

    def counted(index: int, tokens: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = SavedBytes(layers[index], weights, [args[1:], kwargs, layer_keywords(function)])
        with saved_tensors_hooks(saved.pack, lambda saved: saved):
            out = function(*args, **kwargs)
        points[index].append((tokens, saved.total))
        per_input[index] = args[0].untyped_storage().nbytes() / tokens
        return out

    table = facts.token_table(model)
    with isolated_run(model, training=True), head_sees_last(model, 1):
        for tokens, batch in batches.items():
            device = batch.position_ids.device
            ids = torch.arange(tokens, device=device)[None] % table.num_embeddings
            leaf = torch.randn(1, tokens, table.embedding_dim, device=device, dtype=table.weight.dtype)
            keywords = to_transformers_kwargs(batch) | ({"packed_batch": batch} if packs else {})
            functions = [
                (functools.partial(counted, index, tokens) if index in points else _pass_on, True)
                for index in range(len(layers))
            ]
            with layer_functions(layers, functions), embeddings_put_in(model, leaf.requires_grad_()):
                decoder(input_ids=ids, use_cache=False, **keywords)
    working = {index: EXPERTS_SHARE if _has_experts(layers[index]) else WORKING_SHARE for index in points}
    return [LayerCost.through(points[index], per_input[index], working[index]) for index in stand_ins]


class SavedBytes:
    """Counts the distinct storages that autograd saves in one call of a layer, and keeps none of them.

    Args:
        layer: its parameters are not counted, also those that FSDP has gathered.
        weights: addresses of storages that are no activations.
        shared: what all layers are given.

    Attributes:
        total: bytes, without parameters and without what all layers share.
    """

    def __init__(self, layer: nn.Module, weights: set[int], shared: Any) -> None:
        self.total = 0
        self._layer = layer
        self._known = weights | {storage_of(each) for each in tree_leaves(shared) if isinstance(each, Tensor)}
        self._alive: list[torch.UntypedStorage] = []

    def pack(self, tensor: Tensor) -> None:
        """Count a tensor; autograd saves nothing in its place, since no backward pass follows."""
        if not self._alive:  # only now, inside of the layer, has FSDP gathered them
            self._known.update(map(storage_of, self._layer.parameters()))
        place = storage_of(tensor)
        if place not in self._known and tensor.layout is torch.strided and tensor.numel():
            self._known.add(place)
            self._alive.append(tensor.untyped_storage())  # no other tensor gets this address while we count
            self.total += self._alive[-1].nbytes()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory of `tensor`; of one without, as on ``meta``, that of its description."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


def _has_experts(layer: nn.Module) -> bool:
    return any(name.endswith("experts") for name, _ in layer.named_modules())


def _pass_on(_function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden
