"""Wrappers of a checkpoint function: one order, whoever comes first; nothing of them in a copy or afterwards."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from compile_material import checkpoint, make
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fastpack_trl.model.checkpoint_seam import CHECKPOINT, Nesting, checkpoint_wrapped, layer_keywords, stock_checkpoint


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Any, factor: float = 1.0) -> Any:
        return self.linear(hidden) * factor


def layer_with(function: Any = None) -> Any:
    layer = Layer()
    layer.gradient_checkpointing = True
    if function is not None:
        layer._gradient_checkpointing_func = function
    return layer.train()


def plain(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def saying(seen: list[str], name: str) -> Any:
    def wrapper(inner: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return inner(partial(_through, function), *args, **kwargs)

    return wrapper


def _through(function: Any, *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("order", itertools.permutations(Nesting), ids=lambda order: "-".join(p.name for p in order))
def test_wrappers_nest_in_one_order_whichever_comes_or_goes_first(order: tuple[Nesting, ...]) -> None:
    layer, seen, hidden = layer_with(plain), [], torch.ones(2, 4)
    before = dict(layer.__dict__)
    expected = layer(hidden, factor=2.0)
    stacks = {place: contextlib.ExitStack() for place in order}
    for place in order:
        stacks[place].enter_context(checkpoint_wrapped(layer, saying(seen, place.name), place))
    assert torch.equal(layer(hidden, factor=2.0), expected)
    assert seen == ["OFFLOAD", "COMPILE", "PLANS"]
    for place in order:  # not the opposite order
        stacks[place].close()
        seen.clear()
        layer(hidden)
        assert place.name not in seen
    assert seen == []
    assert layer.__dict__ == before
    assert CHECKPOINT not in vars(Layer)


def test_a_function_that_is_set_later_or_anew_is_wrapped() -> None:
    layer, seen = layer_with(), []
    other = layer_with(plain)
    with checkpoint_wrapped(layer, saying(seen, "ours"), Nesting.PLANS):
        assert not hasattr(layer, CHECKPOINT)
        assert stock_checkpoint(layer) is None
        for count, function in enumerate((plain, partial(torch_checkpoint, use_reentrant=False)), start=1):
            layer._gradient_checkpointing_func = function
            assert stock_checkpoint(layer) is function
            assert layer._gradient_checkpointing_func is layer._gradient_checkpointing_func
            layer(torch.ones(2, 4)).sum().backward()
            assert len(seen) == count
        assert other._gradient_checkpointing_func is plain
        del layer._gradient_checkpointing_func
        assert not hasattr(layer, CHECKPOINT)
    assert CHECKPOINT not in vars(Layer)


def test_who_wraps_ours_is_inside_of_the_stack_and_stays_afterwards() -> None:
    layer, seen = layer_with(plain), []
    with checkpoint_wrapped(layer, saying(seen, "ours"), Nesting.PLANS):
        found = layer._gradient_checkpointing_func
        theirs = partial(saying(seen, "theirs"), found)
        layer._gradient_checkpointing_func = theirs
        layer(torch.ones(2, 4))
        assert seen == ["ours", "theirs"]
        layer._gradient_checkpointing_func = found  # as it was read
        assert stock_checkpoint(layer) is plain
        layer._gradient_checkpointing_func = theirs
    seen.clear()
    layer(torch.ones(2, 4))
    assert seen == ["theirs"]


def test_copies_and_pickles_have_the_function_that_was_set() -> None:
    model = make("llama", checkpointing=True)
    layer = model.model.layers[0]
    with checkpoint_wrapped(layer, saying([], "ours"), Nesting.OFFLOAD):
        found = pickle.loads(pickle.dumps(layer)), copy.deepcopy(model).model.layers[0]
        alone = pickle.loads(pickle.dumps(layer._gradient_checkpointing_func))
        for function in (*(each._gradient_checkpointing_func for each in found), alone):
            assert (function.func, function.keywords) == (torch_checkpoint, {"use_reentrant": False})
        with checkpoint_wrapped(found[1], seen := _Counts(), Nesting.OFFLOAD):  # a copy may be wrapped itself
            found[1]._gradient_checkpointing_func(torch.sin, torch.ones(1))
        assert seen.count == 1
    checkpoint(model)  # again, as a second `train()` does
    assert layer._gradient_checkpointing_func.func is torch_checkpoint


class _Counts:
    count = 0

    def __call__(self, inner: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return inner(function, *args, **kwargs)


def test_a_layer_compiled_around_its_wrapped_checkpoint_has_one_graph() -> None:
    layer, graphs = layer_with(partial(torch_checkpoint, use_reentrant=False)), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    hidden = torch.ones(2, 4, requires_grad=True)
    with checkpoint_wrapped(layer, partial(_nothing, "ours"), Nesting.PLANS):
        expected = layer(hidden)
        layer.compile(backend=backend, fullgraph=True)
        assert torch.equal(layer(hidden), expected)
        assert torch.equal(layer(hidden), expected)
    assert len(graphs) == 1


def _nothing(_name: str, inner: Any, function: Any, *args: Any) -> Any:
    return inner(function, *args)


def test_keywords_of_the_layer_are_found_below_what_wrappers_put_around() -> None:
    forward = partial(Layer.forward, Layer(), factor=2.0)
    assert layer_keywords(partial(_through, forward)) == {"factor": 2.0}
    assert layer_keywords(partial(_nothing, "tape", partial(_through, forward))) == {"factor": 2.0}
    assert layer_keywords(partial(Layer.forward, Layer())) == {}
    assert layer_keywords(torch.sin) == {}
