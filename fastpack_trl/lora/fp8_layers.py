"""LoRA layers over a frozen weight in FP8: which can have one, how far its products are off, and how fast they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from fastpack_trl.kernels.fp8 import MULTIPLE
from fastpack_trl.lora.base_weight import Fp8Weight, HostWeight, fp8_linear_weight, is_fp8_linear, loaded_weight
from fastpack_trl.model.facts import text_model

MOST_ERROR = 0.08
"""Relative error of a product from which a layer stays as it was loaded: twice what rounding both factors to 3 bits of
mantissa costs on normally distributed values (0.037)."""
_TIMED = 5


def reasons_against(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, why a layer cannot have its frozen weight in FP8; layers that can are left out."""
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    base = text_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    reasons = {name: _reason_against(layer, head, uses) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason_against(layer: Any, head: Any, uses: Mapping[int, int]) -> str:
    weight = layer.base_layer._parameters.get("weight")
    if layer is head:
        return "the head"
    if type(layer.base_layer).__name__ == "Linear8bitLt":
        return "8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits"
    if layer.fastpack_multiplies_in_fp8:
        return "a weight in FP8 already, of a run that has not ended: end that one first"
    if layer.merged:
        return "merged adapters: call model.unmerge_adapter() first"
    if weight is None or weight.requires_grad:
        return "a base that is no frozen parameter"
    if uses[id(weight)] > 1:
        return "a weight that other modules have too"
    if layer.fastpack_active_adapter() is None:
        return "no or several active adapters"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"dimensions that are no multiples of {MULTIPLE}"
    return ""


def dense_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the frozen weight of a LoRA layer, (out_features, in_features).

    A 4-bit one is made dense in `dtype`, that of an FP8 checkpoint in fp32; a dense one stays in its own.
    """
    base = layer.base_layer
    if is_fp8_linear(base):
        return fp8_linear_weight(base, both_layouts=False).dense(torch.float32)
    return loaded_weight(base).dense(dtype if type(base).__name__ == "Linear4bit" else base.weight.dtype)


def _in_fp8(layer: Any, dtype: torch.dtype, *, both_layouts: bool) -> Fp8Weight:
    if is_fp8_linear(layer.base_layer):
        return fp8_linear_weight(layer.base_layer, both_layouts=both_layouts)
    return Fp8Weight.of(dense_weight(layer, dtype), both_layouts=both_layouts)


@torch.no_grad()
def product_errors(
    layers: Mapping[str, Any], dtype: torch.dtype, run: Callable[[], object]
) -> dict[str, tuple[float, float]]:
    """Return the relative errors of each layer's products in FP8: of its output and of the gradient of its input.

    Args:
        layers: by name.
        dtype: that they compute in.
        run: runs the model once, over some tokens. What a layer reads in its first call is its input here; a layer that
            is not called has random input. Gradients are random.
    """
    errors: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(layer: nn.Module, args: Any) -> None:
            if name not in errors and args[0].numel():
                errors[name] = _errors(args[0].reshape(-1, args[0].shape[-1]).to(dtype), layer)

        return hook

    handles = [layer.register_forward_pre_hook(see(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for name, layer in layers.items():
        if name not in errors:
            errors[name] = _errors(_random(64, layer.in_features, layer.base_layer.weight.device, dtype), layer)
    return {name: (float(both[0]), float(both[1])) for name, both in errors.items()}


def _errors(x: Tensor, layer: Any) -> Tensor:
    base = _in_fp8(layer, x.dtype, both_layouts=False)
    grad = _random(x.shape[0], layer.out_features, x.device, x.dtype)
    out, grad_x = _fp8_products(x, grad, base)
    exact = dense_weight(layer, x.dtype).float()
    return torch.stack([_relative(out, x.float() @ exact.t()), _relative(grad_x, grad.float() @ exact)])


def _relative(found: Tensor, true: Tensor) -> Tensor:
    return (found.float() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float32).tiny)


def _random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, device=device, generator=generator).to(dtype)


def put_in_fp8(layer: Any, dtype: torch.dtype, *, both_layouts: bool, to_host: bool) -> None:
    """Give a layer its frozen weight in FP8, that of an FP8 checkpoint as it is.

    `FastLora._fastpack_drop_copy` takes it back.

    Args:
        layer: of `reasons_against` without one.
        dtype: that a 4-bit weight is made dense in.
        both_layouts: keep the transposed weight too.
        to_host: keep a dense weight in host memory meanwhile. One in 4 or 8 bits stays.
    """
    base = layer.base_layer
    copied = _in_fp8(layer, dtype, both_layouts=both_layouts)
    if to_host and not stays_on_device(base):
        layer.fastpack_on_host = HostWeight(base)
    layer._fastpack_keep_copy(copied)


def stays_on_device(base: Any) -> bool:
    """Return whether a base layer keeps its loaded weight on the device beside that in FP8."""
    return type(base).__name__ == "Linear4bit" or is_fp8_linear(base)


def products_ratio(layers: Mapping[str, Any], tokens: int, dtype: torch.dtype) -> float:
    """Return the time of all products of the layers in `dtype` / that in FP8 with quantisation, forward and backward.

    Over `tokens` rows of random values on the layers' CUDA device, each shape timed by itself with a layer's weight.
    """
    bases: list[Fp8Weight] = [layer.fastpack_dense for layer in layers.values()]
    weights, shapes = {base.weight.shape: base for base in bases}, Counter(base.weight.shape for base in bases)
    total = [0.0, 0.0]
    for (out_features, in_features), fp8 in weights.items():
        count, device = shapes[fp8.weight.shape], fp8.weight.device
        x, grad = (_random(tokens, width, device, dtype) for width in (in_features, out_features))
        weight = _random(out_features, in_features, device, dtype)
        for side, call in enumerate((partial(_dense_products, x, grad, weight), partial(_fp8_products, x, grad, fp8))):
            timer = Timer("call()", globals={"call": call})  # warms up, and waits for the device
            total[side] += count * timer.timeit(_TIMED).mean
    return total[0] / total[1]


def _dense_products(x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight), grad.mm(weight)


def _fp8_products(x: Tensor, grad: Tensor, base: Fp8Weight) -> tuple[Tensor, Tensor]:
    return base.product(base.quantised(x), x.dtype), base.grad_input(base.quantised_grad(grad), x.dtype)
