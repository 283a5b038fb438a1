"""Tiny checkpointed models, steps on them, and the offload on the CPU. Imports no trainer: processes start with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.checkpointing import offload as module
from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointed_layers
from fastpack_trl.testing import gradients, tiny_model

LAYERS = 4


class StopsError(Exception):
    """Ends a step in the middle."""


def enable(model: Any, **keywords: Any) -> Any:
    """Checkpointing as transformers' trainer switches it on; the method was renamed in 5.23."""
    every = keywords.pop("every_n_layers", 1)
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    method = getattr(model, f"{name}_enable")
    method(**{f"{name}_kwargs": {"use_reentrant": False, **keywords}, "every_n_layers": every})
    return model


def make(family: str, *, lora: bool = False, layers: int = LAYERS, **checkpointing: Any) -> Any:
    more = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)} if family == "gpt_oss" else {}
    model = tiny_model(family, num_hidden_layers=layers, **more)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model.enable_input_require_grads()
    return enable(model, **checkpointing)


@contextmanager
def offloaded(layers: Any, mode: Any = "double_buffer", *, min_bytes: int = 1, **options: Any) -> Iterator[Offload]:
    """Offload inputs of `min_bytes` or more of `layers`, which may be a model."""
    layers = checkpointed_layers(layers) if isinstance(layers, nn.Module) else layers
    with patch_attribute(module, "MIN_BYTES", min_bytes), offload_checkpoints(layers, mode, **options) as offload:
        yield offload


def loss_of(model: nn.Module, seed: int = 0, tokens: int = 12) -> Tensor:
    ids = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def step(model: nn.Module, *seeds: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    losses = [loss_of(model, seed) for seed in seeds or (0,)]
    for loss in losses:  # forward, forward, backward, backward
        loss.backward()
    return [loss.detach() for loss in losses], gradients(model)


def assert_same(ours: tuple[list[Tensor], dict[str, Tensor]], stock: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours[0], stock[0], strict=True))
    assert ours[1].keys() == stock[1].keys()
    assert stock[1]
    for name, gradient in stock[1].items():
        assert torch.equal(ours[1][name], gradient), name
