"""Wrappers of a checkpoint function: later ones further outside; nothing of them in a copy or afterwards."""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from offload_material import enable, make
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fastpack_trl.model.checkpoint_seam import CHECKPOINT, checkpoint_wrapped, layer_keywords, stock_checkpoint

HIDDEN = torch.ones(2, 4, requires_grad=True)
PLAIN, OTHER = (partial(torch_checkpoint, use_reentrant=False) for _ in range(2))


class Layer(GradientCheckpointingLayer):
    gradient_checkpointing = True

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if function is not None:
            self._gradient_checkpointing_func = function

    def forward(self, hidden: Any, factor: float = 1.0) -> Any:
        return self.linear(hidden) * factor


def through(_name: str, function: Any, *args: Any) -> Any:
    return function(*args)


def saying(seen: list[str], name: str) -> Any:
    def wrapper(inner: Any, function: Any, *args: Any) -> Any:
        seen.append(name)
        wrapped = partial(through, name, function)
        assert layer_keywords(wrapped) == layer_keywords(function)
        return inner(wrapped, *args)

    return wrapper


@pytest.mark.parametrize("going", itertools.permutations(["first", "second"]), ids="-".join)
def test_wrappers_nest_as_they_come_and_go_in_any_order(going: tuple[str, ...]) -> None:
    layer, seen = Layer(PLAIN), list[str]()
    before, expected = dict(layer.__dict__), layer(HIDDEN, factor=2.0)
    stacks = {name: ExitStack() for name in ("first", "second")}
    for name, stack in stacks.items():
        stack.enter_context(checkpoint_wrapped(layer, saying(seen, name)))
    assert torch.equal(layer(HIDDEN, factor=2.0), expected)
    assert seen == ["second", "first"]
    for name in going:
        stacks[name].close()
        seen.clear()
        layer(HIDDEN)
        assert name not in seen
    assert (seen, layer.__dict__, CHECKPOINT in vars(Layer)) == ([], before, False)


def test_a_function_that_is_set_later_or_anew_is_wrapped_and_one_around_ours_stays() -> None:
    layer, other, seen = Layer(), Layer(PLAIN), list[str]()
    with checkpoint_wrapped(layer, saying(seen, "ours")):
        assert not hasattr(layer, CHECKPOINT)
        for count, function in enumerate((OTHER, PLAIN), start=1):
            layer._gradient_checkpointing_func = function
            assert stock_checkpoint(layer) is function
            assert layer._gradient_checkpointing_func is layer._gradient_checkpointing_func
            layer(HIDDEN).sum().backward()
            assert len(seen) == count
        assert other._gradient_checkpointing_func is PLAIN
        ours = layer._gradient_checkpointing_func
        theirs = partial(saying(seen, "theirs"), ours)
        for function in (theirs, ours, theirs):
            layer._gradient_checkpointing_func = function
            assert stock_checkpoint(layer) is (PLAIN if function is ours else theirs)  # `ours` as it was read
        seen.clear()
        layer(HIDDEN)
        assert seen == ["ours", "theirs"]
    layer(HIDDEN)
    assert seen == ["ours", "theirs", "theirs"]
    with checkpoint_wrapped(layer, saying(seen, "ours")):
        del layer._gradient_checkpointing_func
        assert not hasattr(layer, CHECKPOINT)
    assert CHECKPOINT not in vars(Layer)


def test_copies_and_pickles_have_the_function_that_was_set() -> None:
    model, seen = make("llama"), list[str]()
    layer = model.model.layers[0]
    with checkpoint_wrapped(layer, saying([], "ours")):
        layers = pickle.loads(pickle.dumps(layer)), copy.deepcopy(model).model.layers[0]
        alone = pickle.loads(pickle.dumps(layer._gradient_checkpointing_func))
        for function in (*(each._gradient_checkpointing_func for each in layers), alone):
            assert (function.func, function.keywords) == (torch_checkpoint, {"use_reentrant": False})
        with checkpoint_wrapped(layers[1], saying(seen, "copy")):  # a copy may be wrapped itself
            layers[1]._gradient_checkpointing_func(torch.sin, torch.ones(1))
        assert seen == ["copy"]
    enable(model)  # again, as a second `train()` does
    assert layer._gradient_checkpointing_func.func is torch_checkpoint
