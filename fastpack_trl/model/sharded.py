"""A model that FSDP 2 has parted: it runs as a whole and in all processes at once, and gathers its parameters itself.

Its modules cannot be called one by one: the first unit that runs becomes the root of what is inside, and no parameter
of the others is there. So embeddings are put in, and taken out, by a hook while the whole model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fastpack_trl.model.facts import backbones, text_model


def units(model: nn.Module) -> list[Any]:
    """Return the modules of `model` that gather their parameters by themselves, itself first; none before FSDP 2."""
    # `fully_shard` gives them these methods of `FSDPModule`, and torch builds without it stay importable.
    methods = ("reshard", "unshard")
    return [module for module in model.modules() if all(hasattr(type(module), name) for name in methods)]


def in_any_process(model: nn.Module, here: bool) -> bool:
    """Return `here`; of a parted model whether it holds in any process, since all have to run it alike."""
    if not (units(model) and distributed.is_available() and distributed.is_initialized()):
        return here
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, here)
    return any(answers)


def part_up(model: nn.Module) -> None:
    """Free what units keep gathered after a forward pass whose backward pass never comes."""
    for unit in units(model):
        unit.reshard()


def local(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter: all of it, or its part of a DTensor."""
    part = getattr(parameter, "to_local", None)
    if part is None:
        return parameter.detach()
    with torch.no_grad():
        held: Tensor = part()
    return held


def gathered_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the most bytes of gathered parameters, and of gradients that are not yet parted, at any time of a step.

    Two decoder layers are gathered at a time, the present one and the next; embeddings, the last norm with the head and
    what belongs to no unit may all be there beside them. A gradient is fp32 until it is parted.

    Args:
        model: as FSDP 2 parted it.
        itemsize: of a gathered parameter.
    """
    layers, others = [], 0
    for unit in units(model):
        size = sum(p.numel() * (itemsize + 4 * p.requires_grad) for p in _own(unit))
        if _is_layer(unit):
            layers.append(size)
        else:
            others += size
    return others + 2 * max(layers, default=0)


def pieces(tensors: Iterable[Any]) -> list[Any]:
    """Return what this process holds of each DTensor, and other tensors as they are; memory is shared."""
    with torch.no_grad():
        return [tensor if type(tensor) is Tensor else tensor.to_local() for tensor in tensors]


def shard_group(tensors: Sequence[Any]) -> Any:
    """Return the group of the processes that each hold a piece of every one of `tensors`; None where there is none."""
    mesh = getattr(tensors[0], "device_mesh", None) if tensors else None
    if mesh is None or mesh.ndim != 1:
        return None
    if not all(getattr(tensor, "device_mesh", None) == mesh and tensor.placements[0].is_shard() for tensor in tensors):
        return None
    return mesh.get_group()


def layer_units(model: nn.Module) -> list[Any]:
    """Return the decoder layers of `model` that gather their parameters by themselves."""
    return [unit for unit in units(model) if _is_layer(unit)]


def whole_bytes(layers: Sequence[nn.Module], itemsize: int) -> int:
    """Return the bytes of the gathered parameters of `layers`, with `itemsize` bytes per floating-point number."""
    parameters = [p for layer in layers for p in layer.parameters()]
    return sum(p.numel() * (itemsize if p.is_floating_point() else p.element_size()) for p in parameters)


@contextmanager
def stay_gathered(layers: Sequence[Any]) -> Iterator[None]:
    """Let the forward pass of `layer_units` in this context leave their parameters gathered for their backward pass.

    The backward pass parts them, or the end of the context where none ran: whole parameters that outlive an optimizer
    step would have the values from before it.
    """
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()


def _own(unit: Any) -> list[nn.Parameter]:
    """Return the parameters of a unit that belong to no unit inside of it."""
    theirs = {p for inner in units(unit) if inner is not unit for p in inner.parameters()}
    return [p for p in unit.parameters() if p not in theirs]


def _is_layer(unit: Any) -> bool:
    return hasattr(unit, "gradient_checkpointing") and not hasattr(unit, "get_input_embeddings")


def embeddings_put_in(model: nn.Module, leaf: Tensor) -> AbstractContextManager[None]:
    """Let the decoder of `model` begin with `leaf`, (rows, tokens, hidden), whatever tokens it is given."""
    return _after_embedding(model, lambda output: leaf.to(output.device, output.dtype, copy=True))


def embeddings_take_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Let the decoder of `model` begin with embeddings that take a gradient, trained or not."""
    return _after_embedding(model, lambda output: output.detach().requires_grad_().clone())


def embed(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the embeddings of `ids`, detached; the whole model runs for them, in every process."""
    found: list[Tensor] = []

    def take(output: Tensor) -> Tensor:
        found.append(output.detach().clone())
        return output

    with torch.no_grad(), _after_embedding(model, take):
        model(input_ids=ids, use_cache=False)
    return found[0]


@contextmanager
def head_sees_last(model: nn.Module, count: int) -> Iterator[None]:
    """Let the head of `model` make logits of the last `count` tokens alone, where it reads them from its backbone.

    `logits_to_keep` would have gemma4 cut the queries of layers whose keys are those of the whole row.
    """

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return output[0][:, -count:], *output[1:]
        if hasattr(output, "last_hidden_state"):
            output.last_hidden_state = output.last_hidden_state[:, -count:]
        return output

    handles = [module.register_forward_hook(cut) for module in backbones(model)[:1]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _after_embedding(model: nn.Module, change: Any) -> Iterator[None]:
    """Put what `change` makes of the embeddings in their place: a copy, since some families scale them in place."""
    embedding: Any = text_model(model).get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _module, _args, output: change(output))
    try:
        yield
    finally:
        handle.remove()
