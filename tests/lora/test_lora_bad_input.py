"""Odd inputs and odd moments: a LoRA layer in training does what PEFT's does with them, also where PEFT fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lora_material import adapted, quantized
from torch import Tensor

from fastpack_trl import apply_lora
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.testing import gradients


def layer_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp.up_proj


@pytest.fixture(params=["dense", "nf4"])
def pair(request: Any) -> tuple[Any, Any]:
    """One projection twice: PEFT's, and ours."""
    stock = adapted("llama") if request.param == "dense" else quantized("nf4")
    fast = copy.deepcopy(stock)
    apply_lora(fast)
    found = layer_of(stock), layer_of(fast)
    assert isinstance(found[1], FastLora)
    return found


def results(layer: Any, x: Tensor, grad: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output and gradients."""
    leaf = x.detach().requires_grad_()
    out = layer(leaf)
    out.backward(grad(out))
    assert leaf.grad is not None
    return {"out": out.detach(), "x": leaf.grad, **gradients(layer)}


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_inputs_and_gradients_of_any_strides_and_no_tokens(pair: tuple[Any, Any], tokens: int, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    two, own = (2, tokens, pair[0].in_features), (tokens, 2, pair[0].in_features)
    inputs = [torch.randn(two), torch.randn(own).transpose(0, 1), strided(torch.randn(two))]
    grads: list[Callable[[Tensor], Tensor]] = [
        torch.ones_like,
        lambda out: torch.ones(()).expand_as(out),
        lambda out: strided(torch.ones_like(out)),
    ]
    fast = torch.compile(pair[1], backend="aot_eager", fullgraph=True) if compiled else pair[1]
    for x, grad in zip(inputs, grads, strict=True):
        expected, actual = results(pair[0], x, grad), results(fast, x, grad)
        assert actual["out"].shape == (2, tokens, pair[0].out_features)
        actual = {name.replace("_orig_mod.", ""): value for name, value in actual.items()}
        torch.testing.assert_close({name: actual[name] for name in expected}, expected, rtol=1e-4, atol=1e-5)
        pair[0].zero_grad()
        pair[1].zero_grad()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():  # in training mode
                torch.testing.assert_close(pair[1](x), pair[0](x), rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert pair[1](x).dtype == pair[0](x).dtype


@pytest.mark.parametrize("wrong", ["bf16", torch.int8])
def test_a_wrong_dtype_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"compute_dtype={wrong!r} must be a floating dtype such as torch\.bfloat16"):
        apply_lora(adapted("llama"), compute_dtype=wrong)
