"""What the layers of a model would keep on a device that is not here: the plan's passes on tensors without memory.

The model is on ``meta``; its parameters become fake tensors, whose operators compute shapes only. Attention runs the
backend that the device would get, by the fake kernel of its operator, and experts as their Triton kernels would: those
allocate their results and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention, backend_installed
from fastpack_trl.checkpointing.plan import LayerCost, checkpointable_layers
from fastpack_trl.checkpointing.trace import PROBE_TOKENS, layer_costs
from fastpack_trl.kernels.gate_form import passes_at_bounds
from fastpack_trl.lora import projection
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import ModelFeatures, window_of
from fastpack_trl.model.upstream import FakeTensorMode
from fastpack_trl.moe import experts
from fastpack_trl.moe.feature import apply_moe
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.run import Choice


def costs_of_layers(model: nn.Module, features: ModelFeatures, path: str, *, lora: bool, moe: bool) -> list[LayerCost]:
    """Return what each layer of a model on ``meta`` keeps where rows run the backend `path`.

    Args:
        model: on ``meta``, PEFT or plain; its parameters are fake tensors afterwards.
        features: of the model on the device that is asked about.
        path: name of a backend.
        lora, moe: whether these features are on there.

    Raises:
        RuntimeError, TypeError, ValueError: the decoder cannot be run by itself.
    """
    passes_at_bounds()  # asked of a tensor with values, once
    # Made with values. One document per call would read its length on the host: two run the operator.
    documents = 2 if path == "per_document" else 1
    batches = {tokens: PackedBatch.from_lengths([tokens // documents] * documents) for tokens in PROBE_TOKENS}
    handle = PackedAttention(Choice(path, "asked for", BACKENDS[path].flattens), features)
    dtype, mode = features.compute_dtype, FakeTensorMode(allow_non_fake_inputs=True)
    _made_fake(model, mode)
    with ExitStack() as stack:
        if moe:
            stack.enter_context(apply_moe(model, lora=lora))
        stack.enter_context(backend_installed(model, handle))
        if lora:
            stack.callback(apply_lora(model, compute_dtype=dtype).revert)
        stack.enter_context(_as_triton())
        stack.enter_context(patch_attribute(projection, "_SMALL", {False: 0}))  # rows of a step are longer than probes
        stack.enter_context(mode)
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32))
        layers = checkpointable_layers(model)
        last = {_kind_of(layer): index for index, layer in enumerate(layers)}
        return layer_costs(model, layers, batches, stand_ins=[last[_kind_of(layer)] for layer in layers])


def _kind_of(layer: nn.Module) -> Any:
    """Return what makes a layer another kind of layer: its modules, their windows, shapes and types of its tensors."""
    modules = list(layer.modules())
    attentions = [module for module in modules if hasattr(module, "config") and hasattr(module, "layer_idx")]
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    return tuple(map(type, modules)), tuple(map(window_of, attentions)), tuple(shapes)


def _made_fake(model: nn.Module, mode: Any) -> None:
    """Give the modules fake tensors on the CPU for those on ``meta``; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    with mode:
        for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
            empty = torch.empty_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: made.get(id(tensor), tensor) for name, tensor in held.items() if tensor is not None})


@contextmanager
def _as_triton() -> Iterator[None]:
    """Let the experts allocate what their Triton kernels return: the twins in torch make more on the way."""

    def gate_forward(rows: Tensor, *_: Any) -> Tensor:
        return rows.new_empty(rows.shape[0], rows.shape[1] // 2)

    def gate_backward(rows: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(rows), gate_forward(rows), rows.new_empty(rows.shape[0], dtype=torch.float32)

    def combine(rows: Tensor, inverse: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
        return rows.new_empty(inverse.shape[0], rows.shape[1], dtype=dtype or rows.dtype)

    def bias_weight_grad(grad: Tensor, _bias: Tensor, ids: Tensor) -> Tensor:
        return grad.new_empty(ids.shape, dtype=torch.float32)

    with ExitStack() as stack:
        for function in (gate_forward, gate_backward, combine, bias_weight_grad):
            stack.enter_context(patch_attribute(experts, function.__name__, function))
        yield
