"""Small PEFT models, and the measurements that the LoRA tests share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack_trl import apply_lora
from fastpack_trl.lora import projection
from fastpack_trl.testing import gradients, tiny_model

SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "head_dim")


def adapted(model: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model with LoRA on all projections, its B away from zero; a family's name or a model."""
    shape = {name: settings.pop(name) for name in SHAPE if name in settings}
    base = (tiny_model(model, seed=seed, **shape) if isinstance(model, str) else model).to(dtype)
    fields = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(seed)
    peft = get_peft_model(base, LoraConfig(**fields))
    draw = torch.Generator().manual_seed(seed + 1)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data = (torch.randn(parameter.shape, generator=draw) * 0.05).to(parameter.dtype)
    return peft.train()


@pytest.fixture
def functions_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny inputs take the autograd functions of large ones, too."""
    monkeypatch.setattr(projection, "_SMALL", {False: -1, True: -1})


def any_ids(length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: Tensor, *, autocast: bool = False) -> Tensor:
    """Forward and backward; gradients add up."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def joint_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """``|actual - expected| / |expected|`` over all gradients as one vector."""
    assert actual.keys() == expected.keys()
    squares = [((actual[name].double() - g.double()).square().sum(), g.double().square().sum()) for name, g in
               expected.items()]  # fmt: skip
    difference, size = (torch.stack(column).sum() for column in zip(*squares, strict=True))
    return float((difference / size).sqrt())


def bf16_errors(family: str, seed: int) -> tuple[float, float]:
    """Joint gradient error of PEFT's and of our bf16 step under autocast, against the same weights in float64."""
    exact = adapted(family, seed=seed, dtype=torch.bfloat16).double()
    stock, fast = (adapted(family, seed=seed, dtype=torch.bfloat16) for _ in range(2))
    apply_lora(fast)
    ids = any_ids(length=64, seed=seed)
    step(exact, ids)
    for model in (stock, fast):
        step(model, ids, autocast=True)
    reference = gradients(exact)
    return joint_error(gradients(stock), reference), joint_error(gradients(fast), reference)


def projection_errors(seed: int) -> list[list[float]]:
    """Relative errors of (output, dX, dA, dB) of one layer under autocast: PEFT's, then ours, against float64."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(256, 192)).to(torch.bfloat16),
        LoraConfig(r=8, lora_alpha=16, target_modules=["0"]),
    )
    torch.nn.init.normal_(wrapped.base_model.model[0].lora_B["default"].weight, std=0.1)
    x, grad = torch.randn(512, 256).to(torch.bfloat16), torch.randn(512, 192).to(torch.bfloat16)
    models = [copy.deepcopy(wrapped).double(), wrapped, copy.deepcopy(wrapped)]
    assert apply_lora(models[2]).fast
    results = []
    for model in models:
        exact = model is models[0]
        leaf = (x.double() if exact else x).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            out = model(leaf)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), leaf.grad, *gradients(model).values()])
    return [
        [float((value.double() - right).norm() / right.norm()) for value, right in zip(side, results[0], strict=True)]
        for side in results[1:]
    ]


def saved_bytes(model: Any, ids: Tensor) -> int:
    """Bytes that one forward under autocast keeps for its backward, each storage once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}
    held = []  # a freed storage's address would be given out again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).model
    embedded = backbone.embed_tokens(ids).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        backbone(inputs_embeds=embedded, use_cache=False)
    return sum(seen.values())


class Products(TorchDispatchMode):
    """Counts the matrix products whose three sizes contain `width`, thin ones left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            sizes = (*left.shape, right.shape[1])
            self.count += self.width in sizes and min(sizes) > 16
        return func(*args, **(kwargs or {}))


def products_in_backward(model: Any, ids: Tensor, width: int) -> int:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Products(width) as counted:
        loss.backward()
    return counted.count
