"""Gradients of adapters that a backward pass adds up in one operator: the same sums, and who stays with autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_operators import Counted
from lora_material import adapted, any_ids, step

from fastpack_trl import apply_lora
from fastpack_trl.testing import gradients


def trained(adds_up: bool, change: Callable[[Any], None] | None = None, **settings: Any) -> tuple[Any, int]:
    """A model after two backward passes, the second with or without; and its additions of a whole parameter."""
    model = adapted("qwen3", dtype=torch.bfloat16, **settings)
    report = apply_lora(model)
    step(model, any_ids(), autocast=True)
    if change is not None:
        change(model)
    shapes = {p.shape for p in model.parameters() if p.requires_grad}
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    counted = Counted(lambda name, args: name in ("add", "add_") and getattr(args[0], "shape", None) in shapes)
    with counted:
        if adds_up:
            with report.adding_up():
                step(model, any_ids(seed=1), autocast=True)
        else:
            step(model, any_ids(seed=1), autocast=True)
    assert all(p.grad is held[name] for name, p in model.named_parameters() if name in held)
    return model, counted.count


def assert_bit_equal(found: Any, expected: Any) -> None:
    actual, wanted = gradients(found), gradients(expected)
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 3}}, {"bias": "lora_only"}])
def test_gradients_are_bit_equal_and_their_additions_one_operator(settings: dict[str, Any]) -> None:
    (stock, before), (ours, after) = (trained(adds_up, **settings) for adds_up in (False, True))
    assert_bit_equal(ours, stock)
    adapters = sum("lora_" in name for name in gradients(stock))
    assert adapters == 2 * 7 * 2
    assert before - after == adapters


def test_a_first_gradient_is_as_autograd_makes_it() -> None:
    """None before: nobody is given zeros that were added to."""
    models = [adapted("qwen3", dtype=torch.bfloat16) for _ in range(2)]
    with apply_lora(models[0]).adding_up():
        step(models[0], any_ids(), autocast=True)
    apply_lora(models[1])
    step(models[1], any_ids(), autocast=True)
    assert_bit_equal(*models)


def frozen_with_a_gradient(model: Any) -> None:
    layer_of(model).lora_A["default"].weight.requires_grad_(False)


def without_a_gradient(model: Any) -> None:
    layer_of(model).lora_B["default"].weight.grad = None


def gradient_hook(model: Any) -> None:
    layer_of(model).lora_A["default"].weight.register_hook(lambda gradient: gradient * 3)


def hook_after(model: Any) -> None:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    layer_of(model).lora_A["default"].weight.register_post_accumulate_grad_hook(double)


def adapter_of_two_layers(model: Any) -> None:
    first, second = (layer_of(model, number).lora_A["default"] for number in (0, 1))
    second.weight = first.weight


def layer_of(model: Any, number: int = 0) -> Any:
    return model.base_model.model.model.layers[number].mlp.up_proj


@pytest.mark.parametrize(
    "change",
    [frozen_with_a_gradient, without_a_gradient, gradient_hook, hook_after, adapter_of_two_layers],
    ids=lambda change: change.__name__,
)
def test_what_one_addition_would_change_stays_with_autograd(change: Callable[[Any], None]) -> None:
    (stock, before), (ours, after) = (trained(adds_up, change) for adds_up in (False, True))
    assert_bit_equal(ours, stock)
    assert before - after >= 2 * 7 * 2 - 3


def test_gradients_that_are_asked_for_are_returned() -> None:
    model = adapted("qwen3", dtype=torch.bfloat16)
    apply_lora(model)
    step(model, any_ids(), autocast=True)
    weight = layer_of(model).lora_A["default"].weight
    before = weight.grad.clone()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=any_ids(), labels=any_ids(), use_cache=False).loss
    (found,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(found, before)
    assert torch.equal(weight.grad, before)
