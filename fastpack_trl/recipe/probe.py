"""A model without memory, by its config: its sizes in bytes, and what its layers would keep on a device that is absent.

Its parameters are fake tensors, whose operators compute shapes only. Attention runs the backend that the device would
get, by the fake kernel of its operator, and experts as their Triton kernels would: those allocate their results and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import get_peft_model
from torch import Tensor, nn
from trl import get_peft_config

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention, backend_installed
from fastpack_trl.checkpointing.plan import LayerCost, checkpointable_layers
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches
from fastpack_trl.errors import preparing
from fastpack_trl.kernels.gate_form import passes_at_bounds
from fastpack_trl.lora import projection
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import ModelFeatures, window_of
from fastpack_trl.model.upstream import FakeTensorMode
from fastpack_trl.moe import experts
from fastpack_trl.moe.feature import apply_moe
from fastpack_trl.recipe.arguments import Arguments
from fastpack_trl.run import Choice

_NF4_BLOCK, _NESTED_BLOCK = 64, 256  # numbers per scale; scales per scale of scales
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class Model:
    """A model with its adapters.

    Attributes:
        module: its parameters are fake tensors of `mode`.
        text: config of its language model.
        frozen: bytes of frozen weights.
        numbers, trained: numbers and bytes of those that are trained.
        transient: bytes of the largest frozen weight that is made dense for one use.
    """

    module: Any
    mode: Any
    text: Any
    frozen: float
    numbers: int
    trained: float
    transient: int

    @property
    def has_experts(self) -> bool:
        return any(name.endswith(_EXPERTS) for name, _ in self.module.named_parameters())


def model_of(arguments: Arguments) -> Model:
    """Return the model of a run, of which only the config is read."""
    options, training, mode = arguments.model, arguments.training, FakeTensorMode(allow_non_fake_inputs=True)
    kind = "SequenceClassification" if arguments.method.command == "reward" else "CausalLM"
    with preparing():
        config = transformers.AutoConfig.from_pretrained(
            options.model_name_or_path, revision=options.model_revision, trust_remote_code=training.trust_remote_code
        )
        dtype = getattr(torch, str(options.dtype), None) or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=dtype)
            head, packed = model.get_output_embeddings(), dict[int, float]()  # bytes of a number
            if options.load_in_4bit or options.load_in_8bit:
                size = _nf4(bool(options.use_bnb_nested_quant)) if options.load_in_4bit else 1.0
                linear = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
                packed = {id(module.weight): size for module in linear}
            if training.moe_quantize_experts == "on":
                packed |= {id(p): _nf4(nested=True) for name, p in model.named_parameters() if name.endswith(_EXPERTS)}
        if (peft := get_peft_config(options)) is not None:
            model = get_peft_model(model, peft)
    frozen, numbers, trained, transient = 0.0, 0, 0.0, 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            numbers += parameter.numel()
            # TRL makes the adapters of a quantized base bf16.
            trained += parameter.numel() * (2 if options.load_in_4bit else parameter.element_size())
        else:
            frozen += parameter.numel() * packed.get(id(parameter), float(parameter.element_size()))
            transient = max(transient, parameter.numel() * 2 if id(parameter) in packed else 0)
    _make_fake(model, mode)
    return Model(model, mode, config.get_text_config(), frozen, numbers, trained, transient)


def _make_fake(model: nn.Module, mode: Any) -> None:
    """Give the modules fake tensors on the CPU for those on ``meta``, which PEFT needs; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    with mode:
        for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
            empty = torch.empty_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: made[id(tensor)] for name, tensor in held.items() if tensor is not None})


def _nf4(nested: bool) -> float:
    """Return the bytes of a number: half of one, and a scale per block: fp32, or one byte and an fp32 per 256."""
    scale = 1 + 4 / _NESTED_BLOCK if nested else 4
    return 0.5 + scale / _NF4_BLOCK


def costs_of_layers(of: Model, features: ModelFeatures, path: str, *, lora: bool, moe: bool) -> list[LayerCost]:
    """Return what each layer of a model keeps if rows run the backend `path`.

    Args:
        features: of the model on the device in question.
        path: name of a backend.
        lora, moe: whether these features are on there.

    Raises:
        RuntimeError, TypeError, ValueError: the decoder cannot be run by itself.
    """
    passes_at_bounds()  # computed from a tensor with values, once
    # Made with values. One document per call would read its length on the host: two run the operator.
    model = of.module
    batches = probe_batches(model, documents=2 if path == "per_document" else 1)
    handle = PackedAttention(Choice(path, "asked for", BACKENDS[path].flattens), features)
    dtype = features.compute_dtype
    with ExitStack() as stack:
        if moe:
            stack.enter_context(apply_moe(model, lora=lora))
        stack.enter_context(backend_installed(model, handle))
        if lora:
            stack.callback(apply_lora(model, compute_dtype=dtype).revert)
        stack.enter_context(_as_triton())
        stack.enter_context(patch_attribute(projection, "_SMALL", {False: 0}))  # rows of a step are longer than probes
        stack.enter_context(of.mode)
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
