"""Gradients of adapters that a backward pass adds up in one operator: the same sums, and who stays with autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
    with report.adding_up() if adds_up else nullcontext():  # none to add to: autograd makes the first gradients
        step(model, any_ids(), autocast=True)
    if change is not None:
        change(model)
    shapes = {p.shape for p in model.parameters() if p.requires_grad}
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    counted = Counted(lambda name, args: name in ("add", "add_") and getattr(args[0], "shape", None) in shapes)
    with counted, report.adding_up() if adds_up else nullcontext():
        step(model, any_ids(seed=1), autocast=True)
    assert all(p.grad is held[name] for name, p in model.named_parameters() if name in held)
    return model, counted.count


def assert_bit_equal(found: Any, expected: Any) -> None:
    actual, wanted = gradients(found), gradients(expected)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 3}}, {"bias": "lora_only"}])
def test_gradients_are_bit_equal_and_their_additions_one_operator(settings: dict[str, Any]) -> None:
    (stock, before), (ours, after) = (trained(adds_up, **settings) for adds_up in (False, True))
    assert_bit_equal(ours, stock)
    adapters = sum("lora_" in name for name in gradients(stock))
    assert adapters == 2 * 7 * 2
    assert before - after == adapters


def a_of(model: Any, layer: int = 0) -> Any:
    return model.base_model.model.model.layers[layer].mlp.up_proj.lora_A["default"]


def double(parameter: Any) -> None:
    parameter.grad.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen with a gradient": lambda model: a_of(model).weight.requires_grad_(False),
    "without a gradient": lambda model: setattr(a_of(model).weight, "grad", None),
    "gradient hook": lambda model: a_of(model).weight.register_hook(lambda gradient: gradient * 3),
    "hook after": lambda model: a_of(model).weight.register_post_accumulate_grad_hook(double),
    "adapter of two layers": lambda model: setattr(a_of(model, 1), "weight", a_of(model).weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_one_addition_would_change_stays_with_autograd(change: str) -> None:
    (stock, before), (ours, after) = (trained(adds_up, CHANGES[change]) for adds_up in (False, True))
    assert_bit_equal(ours, stock)
    assert before - after >= 2 * 7 * 2 - 3


def test_gradients_that_are_asked_for_are_returned() -> None:
    model = adapted("qwen3", dtype=torch.bfloat16)
    apply_lora(model)
    step(model, any_ids(), autocast=True)
    weight = a_of(model).weight
    before = weight.grad.clone()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=any_ids(), labels=any_ids(), use_cache=False).loss
    (found,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(found, before)
    assert torch.equal(weight.grad, before)
