"""Bytes that layers keep for backward, counted in forward passes over a few tokens.

Nothing is kept of such a pass, so that it needs the memory of one layer. A run has all layers counted; `doctor`, whose
tensors have no memory, one of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def probe_batches(model: nn.Module, device: torch.device | str = "cpu", documents: int = 1) -> list[PackedBatch]:
    """Return the rows over which `layer_costs` counts, each of equal documents; shorter if positions end earlier."""
    positions = getattr(facts.text_model(model).config.get_text_config(), "max_position_embeddings", None)
    longest = min(_PROBE_TOKENS[-1], positions or _PROBE_TOKENS[-1])
    halves = (tokens * longest // (2 * _PROBE_TOKENS[-1]) for tokens in _PROBE_TOKENS)  # for two even documents
    return [PackedBatch.from_lengths([2 * half // documents] * documents).to(device) for half in halves]


def layer_costs(
    model: nn.Module, layers: Sequence[GradientCheckpointingLayer], batches: Sequence[PackedBatch], *,
    decoder: Any = None, packs: bool = True, stand_ins: Sequence[int] | None = None,
) -> list[LayerCost]:  # fmt: skip
    """Return what each layer keeps, from a pass over each batch, unseen by gradients, random states and hooks.

    Args:
        model: its parameters and buffers are not activations.
        layers: its decoder layers.
        batches: `probe_batches`, on the device of the model.
        decoder: what runs; None: the model without its head.
        packs: layers are given the `PackedBatch`.
        stand_ins: for each layer the one that is counted for it; the others pass their input on. None: all run.
    """
    decoder = facts.backbones(model)[0] if decoder is None else decoder
    stand_ins = range(len(layers)) if stand_ins is None else stand_ins
    weights = {storage_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}
    points: dict[int, list[tuple[int, int]]] = {index: [] for index in stand_ins}
    per_input = dict.fromkeys(stand_ins, 0.0)

    def counted(index: int, function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        shared = tree_leaves([args, kwargs, layer_keywords(function)])  # what all layers are given
        known = weights | {storage_of(each) for each in shared if isinstance(each, Tensor)}
        with storages_saved(layers[index], known) as saved:
            out = function(hidden, *args, **kwargs)
        points[index].append((tokens, sum(storage.nbytes() for storage in saved)))
        per_input[index] = hidden.untyped_storage().nbytes() / tokens
        return out

    functions = [
        functools.partial(counted, index) if index in points else lambda _function, hidden, *args, **kwargs: hidden
        for index in range(len(layers))
    ]
    table = facts.token_table(model)
    with isolated_run(model, training=True), head_sees_last(model), layer_functions(layers, functions):
        for batch in batches:
            device, tokens = batch.position_ids.device, batch.position_ids.shape[-1]
            ids = torch.arange(tokens, device=device)[None] % table.num_embeddings
            leaf = torch.randn(1, tokens, table.embedding_dim, device=device, dtype=table.weight.dtype)
            keywords = to_transformers_kwargs(batch) | ({"packed_batch": batch} if packs else {})
            with embeddings_put_in(model, leaf.requires_grad_()):
                decoder(input_ids=ids, use_cache=False, **keywords)
    costs = {}
    for index, measured in points.items():
        has_experts = any(name.endswith("experts") for name, _ in layers[index].named_modules())
        costs[index] = LayerCost.through(measured, per_input[index], EXPERTS_SHARE if has_experts else WORKING_SHARE)
    return [costs[index] for index in stand_ins]


@contextmanager
def storages_saved(layer: nn.Module, known: set[int]) -> Iterator[list[torch.UntypedStorage]]:
    """Collect the distinct storages that autograd saves in one call of a layer; the graph keeps none of them.

    Args:
        layer: its parameters are not collected, also those that FSDP has gathered.
        known: addresses of others that are not; those found are added.
    """
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> None:
        if not saved:  # only now, inside of the layer, has FSDP gathered them
            known.update(map(storage_of, layer.parameters()))
        place = storage_of(tensor)
        if place not in known and tensor.layout is torch.strided and tensor.numel():
            known.add(place)
            saved.append(tensor.untyped_storage())  # no other tensor gets this address while we count

    with saved_tensors_hooks(pack, lambda saved: saved):
        yield saved


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory of `tensor`; of one without, as on ``meta``, that of its description."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
