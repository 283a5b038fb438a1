"""Memory that runs out, steps that break off, inputs of odd shapes: training goes on the next best way, said once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from offload_material import StopsError, assert_same, loss_of, make, offloaded, step
from recording_streams import RecordingStreams
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fastpack_trl.checkpointing.offload import Offload


@contextmanager
def recorded(model: nn.Module, streams: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[Any, Offload]]:
    made = RecordingStreams(**(streams or {}))
    with offloaded(model, streams=lambda device: made, **options) as offload:
        yield made, offload


UNPINNED = "layer inputs stay on the device: host memory cannot be pinned (CUDA error: out of memory)"
USED_UP = "half of the host memory that was free"


@pytest.mark.parametrize(
    ("options", "moved", "said"),
    [
        ({"budget_bytes": 1}, 0, USED_UP), ({"budget_bytes": 3 * 4096}, 3, USED_UP), ({"budget_bytes": 2**16}, 7, ""),
        ({"streams": {"pinned_bytes": 0}}, 0, UNPINNED),
        ({"streams": {"device_blocks": 1}}, 7, "a second layer input does not fit on the device: single buffer"),
    ],
    ids=str,
)  # fmt: skip
def test_memory_that_runs_out_is_tried_once_and_named(options: dict[str, Any], moved: int, said: str) -> None:
    model = make("llama", layers=8)
    stock = step(model)
    with recorded(model, **options) as (_, offload):
        for _ in range(3):
            assert_same(step(model), stock)
        assert offload.use.pinned == moved * 4096
        assert offload.use.held == 0
        assert offload.fallbacks[0].startswith(said) or said in offload.fallbacks[0] if said else not offload.fallbacks
        assert len(offload.fallbacks) <= 1 + (said == UNPINNED)  # then nothing is left of the budget
        assert offload.prefetch == ("device_blocks" not in str(options))
    assert offload.use.pinned == 0


def test_no_device_memory_for_even_one_input_raises_and_leaves_nothing_behind() -> None:
    model = make("llama")
    stock = step(model)
    with recorded(model, {"device_blocks": 0}) as (streams, offload):
        loss = loss_of(model)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        assert offload.use.held == 0
        streams.device_blocks = None
        assert_same(step(model), stock)


def test_no_leak_over_60_steps_of_which_every_third_breaks_off() -> None:
    """In forward, in the recompute (the second call of the layer in a step), or before any backward."""
    model = make("llama", layers=3)
    pinned = []
    with recorded(model) as (streams, offload):
        for number in range(60):
            where, calls = None if number % 3 else number // 3 % 3, count()

            def fail(*args: Any, calls: Any = calls, at: int | None = where) -> None:
                if next(calls) == at:
                    raise StopsError

            handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
            with nullcontext() if where is None else pytest.raises(StopsError):
                loss: Any = loss_of(model, number, 4 + number % 9)  # batches of several sizes
                if where == 2:
                    raise StopsError
                loss.backward()
            handle.remove()
            loss = None
            assert offload.use.held == 0, number
            assert streams.live_blocks <= 1, number  # a fetched input that nobody read goes with the next step
            pinned.append(offload.use.pinned)
    assert pinned[30] == pinned[-1]
    assert (offload.use.pinned, streams.live_blocks) == (0, 0)


class Layer(GradientCheckpointingLayer):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Any, *others: Any) -> Tensor:
        hidden = x if isinstance(x, Tensor) else x[0]
        for other in others:
            hidden = hidden + other if isinstance(other, Tensor) else hidden * (other or 1)
        return torch.tanh(self.linear(hidden))


def layers_offloaded(layers: list[Layer]) -> Any:
    return offloaded(layers, streams=lambda _: RecordingStreams(), keep_last=0)


SHAPES = {
    "transposed": (lambda x: x.transpose(0, 1), 1),
    "a view with an offset": (lambda x: torch.cat([x, x])[len(x) :], 1),
    "a view at an odd address": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), 0),
    "with gaps": (lambda x: torch.stack([x, x], -1)[..., 0], 0),
    "expanded": (lambda x: x[:1].expand_as(x), 0),
    "a subclass": (lambda x: torch.nn.Parameter(x.detach()), 0),
    "empty": (lambda x: x[:0], 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_input_of_any_layout_comes_back_as_it_was_or_stays_named(shape: str) -> None:
    make_input, moved = SHAPES[shape]
    layers = [Layer() for _ in range(3)]
    x = torch.randn(8, 8, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]

    def run() -> list[Tensor]:
        strides: list[Any] = []
        layers[0].linear.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
        hidden = make_input(x)
        for layer in layers:
            hidden = layer(hidden)
        found = torch.autograd.grad(hidden.square().sum(), [x, *parameters], allow_unused=True)
        assert len(set(strides)) == 1
        return [gradient for gradient in found if gradient is not None]

    stock = run()
    with layers_offloaded(layers) as offload:
        ours = run()
        assert offload.use.most_held == (0 if shape == "empty" else 2 + moved) * 256
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, stock, strict=True))
    assert len(offload.fallbacks) == (not moved and shape != "empty")


@pytest.mark.parametrize("case", ["none", "a number", "a tensor", "a leaf", "a list"])
def test_other_arguments_of_a_layer_are_left_alone(case: str) -> None:
    layers = [Layer() for _ in range(2)]
    x, leaf = torch.randn(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    others = {"none": (None,), "a number": (3,), "a tensor": (torch.ones(8, 8),), "a leaf": (leaf,)}.get(case, ())

    def run() -> list[Tensor]:
        out = layers[1](layers[0]([x * 1] if case == "a list" else x * 1, *others), *others)
        found = torch.autograd.grad(out.sum(), [x, layers[0].linear.weight, leaf], allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    stock = run()
    with layers_offloaded(layers) as offload:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(), stock, strict=True))
        assert offload.use.most_held == (1 if case == "a list" else 2) * 256


@pytest.mark.parametrize("keep", [0, 2])
def test_an_input_changed_in_place_after_it_was_saved_is_an_error(keep: int) -> None:
    layers = [Layer() for _ in range(2)]
    with offloaded(layers, streams=lambda _: RecordingStreams(), keep_last=keep):
        x = torch.randn(8, 8)
        hidden = layers[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place after it was saved"):
            layers[1](hidden).sum().backward()
