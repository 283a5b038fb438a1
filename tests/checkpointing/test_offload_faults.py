"""Memory that runs out, steps that break off, inputs of odd shapes: training goes on the next best way, said once."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from offload_material import LAYERS, assert_same, loss_of, make, offloaded, step
from recording_streams import RecordingStreams
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fastpack_trl.checkpointing.offload import checkpointed_layers, offload_checkpoints
from fastpack_trl.testing import gradients, tiny_model


@pytest.mark.parametrize("budget_bytes", [1, 8192, 2**16])
def test_past_the_pinned_budget_memory_is_pageable_named_once(budget_bytes: int) -> None:
    model = make("llama", layers=8)
    stock = step(model)
    with offloaded(model, offload_budget_gib=budget_bytes / 2**30) as offload:
        for _ in range(3):
            assert_same(step(model), stock)
        use = offload.use
        assert use.pinned <= budget_bytes
        assert bool(use.pageable) == (budget_bytes < 2**16)
        assert sum("pageable memory from here on" in text for text in offload.said) == bool(use.pageable)
        assert use.leases == 0
    assert offload.use.pageable == 0


def test_a_budget_larger_than_the_host_is_cut_and_named() -> None:
    model = make("llama")
    stock = step(model)
    with offloaded(model, offload_budget_gib=1e9) as offload:
        assert_same(step(model), stock)
        assert [text for text in offload.said if "more than the host has" in text]


def test_refused_pinned_memory_becomes_pageable_and_exhausted_host_memory_stays_on_the_device() -> None:
    model = make("llama", layers=8)
    stock = step(model)
    streams = RecordingStreams(pinned_bytes=0)
    with offloaded(model, streams=lambda device: streams) as offload:
        assert_same(step(model), stock)
        assert offload.use.pageable
        streams.host_bytes = 0
        assert_same(step(model, 0, 1, 2), step_without(model, 0, 1, 2))
        assert_same(step(model, 0, 1, 2), step_without(model, 0, 1, 2))
    pinned, host = offload.said
    assert "pinned memory was refused (CUDA error: out of memory)" in pinned
    assert "stay on the device" in host


def step_without(model: nn.Module, *seeds: int) -> Any:
    """The same step with the checkpoint functions of the layers alone, which a copy has."""
    return step(copy.deepcopy(model), *seeds)


def test_a_second_input_that_does_not_fit_makes_it_a_single_buffer_said_once() -> None:
    model = make("llama", layers=8)
    stock = step(model)
    streams = RecordingStreams(device_blocks=1)
    with offloaded(model, streams=lambda device: streams) as offload:
        for _ in range(3):
            assert_same(step(model), stock)
        assert not next(iter(offload.offloaders.values())).prefetch
        (said,) = offload.said
        assert "single buffer from here on" in said


def test_no_device_memory_for_even_one_input_raises_and_leaves_nothing_behind() -> None:
    model = make("llama")
    streams = RecordingStreams(device_blocks=0)
    with offloaded(model, streams=lambda device: streams) as offload:
        loss = loss_of(model)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        assert (offload.use.leases, offload.use.leased) == (0, 0)
        streams.device_blocks = None
        stock = step_without(model)
        assert_same(step(model), stock)


class BreaksError(Exception):
    """Raised by a layer of a test."""


def test_no_leak_over_200_steps_of_which_every_third_breaks_off() -> None:
    model = make("llama", layers=3)
    streams = RecordingStreams()
    broken = pinned = 0
    with offloaded(model, streams=lambda device: streams) as offload:
        for number in range(200):
            tokens = 4 + number % 9  # batches of several sizes
            model.zero_grad()
            if number % 3:
                loss_of(model, number, tokens).backward()
            else:
                # In forward, in the recompute (the second call of the layer in a step), or before any backward.
                where = number // 3 % 3
                calls = iter(range(10))

                def fail(*args: Any, calls: Any = calls, at: int = where) -> None:
                    if next(calls) == at:
                        raise BreaksError

                handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
                try:
                    loss = loss_of(model, number, tokens)
                    if where == 2:
                        raise BreaksError
                    loss.backward()
                except BreaksError:
                    broken += 1
                finally:
                    handle.remove()
                loss = None
            use = offload.use
            assert (use.leases, use.leased, streams.live_blocks) == (0, 0, 0), number
            pinned = use.pinned if number == 30 else pinned
        assert use.pinned == pinned
        assert broken == 67
    assert (offload.use.pinned, offload.use.pageable) == (0, 0)


def test_batches_that_grow_leave_no_more_than_the_budget() -> None:
    model = make("llama")
    budget = 2**17
    streams = RecordingStreams()
    with offloaded(model, streams=lambda device: streams, offload_budget_gib=budget / 2**30) as offload:
        for tokens in (2, 4, 8, 16, 32, 64, 128):
            model.zero_grad()
            loss_of(model, 0, tokens).backward()
            ours = gradients(model)
            assert offload.use.pinned <= budget
            assert offload.use.leases == 0
        assert "free host memory" in streams.log
        model.zero_grad()
        alone = copy.deepcopy(model)
        loss_of(alone, 0, 128).backward()
        assert all(torch.equal(ours[name], value) for name, value in gradients(alone).items())


class Layer(GradientCheckpointingLayer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Any, *others: Any) -> Tensor:
        hidden = x if isinstance(x, Tensor) else x[0]
        for other in others:
            hidden = hidden + other if isinstance(other, Tensor) else hidden * (other or 1)
        return torch.tanh(self.linear(hidden))


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


SHAPES = {
    "transposed": (lambda x: x.transpose(0, 1), 1),
    "a view with an offset": (lambda x: torch.cat([x, x])[len(x) :], 1),
    "a view at an odd address": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), 0),
    "with gaps": (_strided, 0),
    "expanded": (lambda x: x[:1].expand_as(x), 0),
    "a subclass": (lambda x: torch.nn.Parameter(x.detach()), 0),
    "empty": (lambda x: x[:0], 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_input_of_any_layout_comes_back_as_it_was_or_stays_named(shape: str) -> None:
    make_input, leased = SHAPES[shape]
    layers = [Layer(8) for _ in range(3)]
    x = torch.randn(8, 8, requires_grad=True)

    def run() -> list[Tensor]:
        inputs = make_input(x)
        strides: list[Any] = []
        layers[0].linear.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
        hidden = layers[0](inputs)
        for layer in layers[1:]:
            hidden = layer(hidden)
        x.grad = None
        hidden.square().sum().backward()
        assert len(set(strides)) == 1
        found = [p.grad.clone() for layer in layers for p in layer.parameters()]
        for layer in layers:
            layer.zero_grad()
        return found + ([x.grad] if x.grad is not None else [])

    stock = run()
    with offload_checkpoints(layers, min_bytes=1, streams=lambda d: RecordingStreams(), keep_last_layers=0) as offload:
        ours = run()
        assert offload.use.most_leased == (0 if shape == "empty" else 2 + leased) * 4096
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, stock, strict=True))
    assert len(offload.said) == (not leased and shape != "empty")


@pytest.mark.parametrize(
    "others", [(), (None,), (3,), (torch.ones(8, 8),), (torch.ones(8, 8, requires_grad=True),)], ids=str
)
def test_other_arguments_of_a_layer_are_left_alone_unless_they_carry_a_gradient(others: tuple[Any, ...]) -> None:
    layers = [Layer(8) for _ in range(2)]
    x = torch.randn(8, 8, requires_grad=True)

    def run() -> list[Tensor]:
        for leaf in (x, *others):
            if isinstance(leaf, Tensor):
                leaf.grad = None
        for layer in layers:
            layer.zero_grad()
        layers[1](layers[0](x, *others), *others).sum().backward()
        leaves = [x, *(other for other in others if isinstance(other, Tensor)), layers[0].linear.weight]
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    stock = run()
    with offload_checkpoints(layers, min_bytes=1, streams=lambda d: RecordingStreams(), keep_last_layers=0) as offload:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(), stock, strict=True))
        gradient = bool(others) and isinstance(others[0], Tensor) and others[0].requires_grad
        assert offload.use.most_leased == (4 if gradient else 2) * 4096


def test_a_first_argument_that_is_no_tensor_is_left_alone() -> None:
    layer = Layer(8)
    x = torch.randn(8, 8, requires_grad=True)
    with offload_checkpoints([layer], min_bytes=1, streams=lambda d: RecordingStreams(), keep_last_layers=0) as offload:
        layer([x]).sum().backward()
        layer(7 * torch.ones(8, 8, dtype=torch.long).float()).sum().backward()
        assert offload.use.most_leased == 4096


def test_inputs_that_share_storage_come_back_each() -> None:
    layers = [Layer(8) for _ in range(2)]
    x = torch.randn(16, 8, requires_grad=True)

    def run() -> list[Tensor]:
        x.grad = None
        halves = x * 1
        (layers[0](halves[:8]) + layers[1](halves[8:]) + layers[0](halves[:8])).sum().backward()
        return [x.grad.clone()]

    stock = run()
    with offload_checkpoints(layers, min_bytes=1, streams=lambda d: RecordingStreams(), keep_last_layers=0) as offload:
        assert torch.equal(run()[0], stock[0])
        assert offload.use.most_leased == 3 * 4096


def test_an_input_changed_in_place_after_it_was_stored_is_an_error() -> None:
    layers = [Layer(8) for _ in range(2)]
    with offload_checkpoints(layers, min_bytes=1, streams=lambda d: RecordingStreams(), keep_last_layers=0):
        x = torch.randn(8, 8)
        hidden = layers[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place after it was stored"):
            layers[1](hidden)


def test_a_model_without_checkpointing_raises_with_the_remedy() -> None:
    layers = checkpointed_layers(tiny_model("llama"))
    with pytest.raises(ValueError, match="gradient_checkpointing=True on a model that supports it"):
        with offload_checkpoints(layers):
            pass
    assert len(checkpointed_layers(make("llama"))) == LAYERS
