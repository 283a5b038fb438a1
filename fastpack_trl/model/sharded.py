"""A model that FSDP 2 has sharded: it runs as a whole and in all processes at once, and gathers its parameters itself.

Its modules cannot be called one by one: the first FSDP module that runs becomes the root of those inside, and the
parameters of the others are missing. So a hook replaces, or returns, embeddings while the whole model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fastpack_trl.model.facts import backbones, text_model


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of `model` that gather their parameters by themselves, itself first; none before FSDP 2."""
    # By two methods of `FSDPModule`: torch builds without FSDP stay importable.
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]


def layer_units(model: nn.Module) -> list[Any]:
    """Return the decoder layers of `model` that gather their parameters by themselves."""
    checkpointing = [unit for unit in fsdp_modules(model) if hasattr(unit, "gradient_checkpointing")]
    return [unit for unit in checkpointing if not hasattr(unit, "get_input_embeddings")]


def any_rank(model: nn.Module, here: bool) -> bool:
    """Return `here`; of a sharded model, which all processes have to run alike, whether it holds in any of them."""
    if not (fsdp_modules(model) and distributed.is_available() and distributed.is_initialized()):
        return here
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, here)
    return any(answers)


def reshard_all(model: nn.Module) -> None:
    """Free parameters that stay gathered after a forward pass without a backward pass."""
    for unit in fsdp_modules(model):
        unit.reshard()


def pieces(tensors: Iterable[Any]) -> list[Any]:
    """Return the shard of each DTensor that this process holds, and other tensors as they are; memory is shared."""
    with torch.no_grad():
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def local(parameter: Any) -> Tensor:
    """Return the part of a parameter that this process holds, detached: all of it, or a shard of a DTensor."""
    held: Tensor = pieces([parameter])[0].detach()
    return held


def gathered_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the peak bytes in a step of gathered parameters, `itemsize` each, and of gradients not yet sharded.

    Two decoder layers are gathered at a time, the present one and the next; embeddings, the last norm with the head and
    the parameters of no unit may all be gathered besides. A gradient is fp32 until it is sharded.
    """

    def size(unit: Any) -> int:
        inside = {p for inner in fsdp_modules(unit)[1:] for p in inner.parameters()}
        return sum(p.numel() * (itemsize + 4 * p.requires_grad) for p in unit.parameters() if p not in inside)

    layers = layer_units(model)
    return sum(size(unit) for unit in fsdp_modules(model) if unit not in layers) + 2 * max(map(size, layers), default=0)


def whole_bytes(layers: Sequence[nn.Module], itemsize: int) -> int:
    """Return the bytes of the gathered parameters of `layers`, with `itemsize` bytes per floating-point number."""
    parameters = [p for layer in layers for p in layer.parameters()]
    return sum(p.numel() * (itemsize if p.is_floating_point() else p.element_size()) for p in parameters)


def shard_group(tensors: Sequence[Any]) -> Any:
    """Return the group of the processes that each hold a shard of every one of `tensors`; None if there is none."""
    mesh = getattr(tensors[0], "device_mesh", None) if tensors else None
    if mesh is None or mesh.ndim != 1:
        return None
    alike = all(getattr(tensor, "device_mesh", None) == mesh and tensor.placements[0].is_shard() for tensor in tensors)
    return mesh.get_group() if alike else None


@contextmanager
def keep_unsharded(layers: Sequence[Any]) -> Iterator[None]:
    """Keep the parameters of `layer_units` gathered from their forward pass in this context to their backward pass.

    The backward pass shards them again, or the end of the context if none ran: gathered parameters that outlive an
    optimizer step have the values from before it.
    """
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()


def embeddings_put_in(model: nn.Module, leaf: Tensor) -> AbstractContextManager[Any]:
    """Make the decoder of `model` begin with `leaf`, (rows, tokens, hidden), whatever tokens it is given."""
    return _after_embedding(model, lambda output: leaf.to(output.device, output.dtype, copy=True))


def embeddings_take_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Make the decoder of `model` begin with embeddings that take a gradient, trained or not."""
    return _after_embedding(model, lambda output: output.detach().requires_grad_().clone())


def embed(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the embeddings of `ids`, detached; the whole model runs for them, in every process."""
    outputs: list[Tensor] = []
    with torch.no_grad(), _after_embedding(model, lambda output: outputs.append(output.detach().clone())):
        model(input_ids=ids, use_cache=False)
    return outputs[0]


def _after_embedding(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[Any]:
    """Replace the embeddings by what `change` returns: a copy, since some families scale them in place."""
    embedding: nn.Module = text_model(model).get_input_embeddings()
    return embedding.register_forward_hook(lambda _module, _args, output: change(output))


def head_sees_last(model: nn.Module, count: int) -> AbstractContextManager[Any]:
    """Let the head of `model` make logits of the last `count` tokens alone, where it reads them from its backbone.

    `logits_to_keep` would have gemma4 cut the queries of layers whose keys are those of the whole row.
    """

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return output[0][:, -count:], *output[1:]
        if not hasattr(output, "last_hidden_state"):
            return output
        return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, -count:]})

    inner = backbones(model)
    return inner[0].register_forward_hook(cut) if inner else nullcontext()
