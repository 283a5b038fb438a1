"""The sides of the case ``moe``: models with experts, and the implementations that run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.model_shapes import MODELS, ModelShape, build_model, decoder_shape, gpt_oss_fields, moe_fields
from fastpack_trl.moe.feature import apply_moe
from fastpack_trl.moe.layout import experts_modules

STOCK, OURS = "stock", "fastpack"
MODES = ("lora", "frozen", "full")
RANK = 16

SMALL = {
    "qwen3_moe-small": decoder_shape(
        "qwen3_moe", (3, 256, 512), (4, 2, 64), 512, theta=1e4, experts=moe_fields(32, 8, 128)
    ),
    "gpt_oss-small": decoder_shape(
        "gpt_oss", (3, 320, 320), (5, 1, 64), 512, theta=1.5e5, eps=1e-5, experts=gpt_oss_fields(16, 4, 128, 3)
    ),
}
"""For the CPU, in fp32."""

PUBLIC = {name: MODELS[name] for name in ("gpt-oss-20b", "qwen3-30b-a3b", "tiny-gpt-oss")}
SHAPES = {**SMALL, **PUBLIC}


def make_model(shape: ModelShape, mode: str, *, tokens: int, seed: int, device: str) -> Any:
    """Make a model with random weights in training mode.

    Args:
        mode: ``lora`` (rank 16 on both stacks of every layer), ``frozen`` (experts take no gradient, the rest of the
            layer neither) or ``full`` (the expert stacks train).
    """
    model = build_model(shape, positions=tokens, seed=seed, device=device)
    model.requires_grad_(False)
    if mode == "full":
        for module in experts_modules(model).values():
            module.requires_grad_(True)
    elif mode == "lora":
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_parameters=stacks))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at the start: the gradient of A would be nothing
                    parameter.normal_(std=0.02)
    return model.train()


def routing(tokens: int, top_k: int, num_experts: int, skewed: bool, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw (T, k) distinct expert ids and routing weights in fp32: uniform, or a few experts taking most tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(tokens, num_experts, generator=generator, device=device)
    if skewed:
        scores += torch.linspace(3, 0, num_experts, device=device)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights.softmax(-1)


SIDES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    STOCK: lambda model: contextlib.nullcontext(),
    OURS: apply_moe,
}


@contextlib.contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Run an experts implementation of transformers: ``eager`` (a loop over experts), ``grouped_mm``."""
    configs = [module.config for module in experts_modules(model).values()]
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation_internal = name
        yield
    finally:
        for config, earlier in zip(configs, before, strict=True):
            config._experts_implementation_internal = earlier


def saved_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that a forward keeps for backward beside the parameters, each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run()
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return total
