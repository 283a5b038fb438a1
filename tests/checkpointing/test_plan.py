"""A plan of levels: products as the level says, bit-equal in any mix, the most that fits, and what is left to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decoder_material import installed
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from offload_material import LAYERS, assert_same, enable, loss_of, make, step

from fastpack_trl.checkpointing.plan import WORKING_SHARE, LayerCost, Level, Plan, layer_levels
from fastpack_trl.model.checkpoint_seam import checkpointable_layers, checkpointed_layers
from fastpack_trl.model.upstream import GradientCheckpointingLayer

KEEP, CHECKPOINT, OFFLOAD = Level
pytestmark = pytest.mark.usefixtures("offloads")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_backward_runs_again_what_the_level_says(family: str) -> None:
    model, ran = make(family), list[int]()
    layers = checkpointable_layers(model)
    for index, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    for levels in ([KEEP] * 4, [CHECKPOINT] * 4, [OFFLOAD] * 4, [CHECKPOINT, CHECKPOINT, KEEP, KEEP]):
        with layer_levels(layers, levels):
            loss = loss_of(model)
            ran.clear()
            loss.backward()
        assert ran == [index for index in reversed(range(LAYERS)) if levels[index] is not KEEP]


@pytest.mark.parametrize(
    ("family", "lora", "ours"),
    [("llama", False, True), ("qwen3", True, True), ("gpt_oss", False, True), ("qwen3_moe", False, True),
     ("qwen3", True, False), ("gpt_oss", False, False)],
)  # fmt: skip
def test_loss_and_gradients_are_bit_equal_at_every_level_and_in_any_mix(family: str, lora: bool, ours: bool) -> None:
    model = make(family, lora=lora)
    layers = checkpointable_layers(model)
    mixes = [[level] * LAYERS for level in Level]
    mixes += [[OFFLOAD, OFFLOAD, CHECKPOINT, KEEP], [CHECKPOINT, KEEP, OFFLOAD, KEEP], [OFFLOAD, OFFLOAD, KEEP, KEEP]]
    with installed(model, ours=ours):
        stock = step(model, 0, 1)  # every layer as `make` has it: checkpointed by transformers
        for levels in mixes:
            with layer_levels(layers, levels) as offload:
                assert_same(step(model, 0, 1), stock)
                assert (offload is not None) == (OFFLOAD in levels)
                assert offload is None or offload.use.held == 0
    assert all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("kept", range(LAYERS))
def test_the_input_of_the_last_recomputed_layer_stays_on_the_device(kept: int) -> None:
    """While that layer runs, the input before its own is fetched: none is waited for from the beginning."""
    model = make("llama")
    levels = [OFFLOAD] * (LAYERS - kept) + [KEEP] * kept
    with layer_levels(checkpointable_layers(model), levels) as offload:
        step(model)
        assert offload.use.most_held == (LAYERS - kept - 1) * 2 * 12 * 32 * 4


def plan_of(layers: int, keep: int, inputs: int, budget: int = 0, *, can_offload: bool = True) -> Plan:
    sizes = (keep, inputs, keep // 2)
    return Plan(*((size,) * layers for size in sizes), budget, layers, can_offload=can_offload)


@examples(max_examples=200, deadline=None)
@example(layers=3, sizes=[0, 193], budget=675)
@given(layers=st.integers(1, 6), sizes=st.tuples(*[st.integers(0, 1000)] * 2), budget=st.integers(0, 8000))
def test_the_plan_keeps_most_last_layers_and_offloads_if_it_must(layers: int, sizes: list[int], budget: int) -> None:
    inputs, keep = sorted(sizes)
    whole = plan_of(layers, keep, inputs, budget)
    plan = whole.best()
    assert plan.fits == whole.last_kept(0, OFFLOAD).fits
    assert list(plan.levels) == sorted(plan.levels, reverse=True)
    kept = plan.levels.count(KEEP)
    if plan.fits and kept < layers:
        below = plan.levels[0]
        assert not whole.last_kept(kept + 1, below).fits
        assert below is CHECKPOINT or not whole.last_kept(0).fits
    assert max(replace(whole, budget=budget + 500).best().levels) <= max(plan.levels)
    tried, deeper = [plan.levels], plan.deeper()
    while deeper is not None:
        assert sum(map(int, deeper.levels)) > sum(map(int, tried[-1]))
        tried.append(deeper.levels)
        deeper = deeper.deeper()
    assert tried[-1] == (OFFLOAD,) * layers
    assert len(tried) <= layers.bit_length() + 3


def test_what_the_last_layers_keep_is_gone_when_the_first_are_computed_again() -> None:
    whole = plan_of(4, 100, 10)
    assert whole.predicted == 400 + 50
    assert whole.last_kept(0).predicted == 40 + 150
    assert whole.last_kept(1, OFFLOAD).predicted == 10 + 150  # the kept input, and either of both, not their sum
    assert whole.last_kept(2, OFFLOAD).predicted == 10 + 200 + 50
    assert whole.last_kept(1).predicted == 30 + 150


def test_without_offload_the_last_plan_checkpoints_every_layer() -> None:
    plan: Any = plan_of(6, 100, 10, can_offload=False)
    assert plan.best().levels == (CHECKPOINT,) * 6
    kept = []
    while plan is not None:
        kept.append(plan.levels.count(KEEP))
        plan = plan.deeper()
    assert kept == [6, 3, 1, 0]


def test_bytes_grow_with_tokens_and_kept_scores_with_the_longest_document_too() -> None:
    scores = LayerCost.through([(64, 100 + 64 * 5 + 64**2), (128, 100 + 128 * 5 + 128**2), (192, 1060 + 192**2)], 2.0)
    assert scores.at(1000, 250) == 100 + 5000 + 1000 * 250
    experts = replace(scores, working=2.0)
    plan = Plan.keeping_all([scores, experts], 1000, 250, 10**6, dense=7)
    assert (plan.kept, plan.inputs) == ((255100,) * 2, (2000,) * 2)
    assert plan.working == (round(255100 * WORKING_SHARE) + 7, 255100 * 2 + 7), "one weight at a time is made dense"


def test_a_layer_inside_of_a_layer_goes_with_it() -> None:
    """As in Zamba2: one level, one input in host memory, and nothing is recomputed twice or in a kept layer."""

    class Outer(GradientCheckpointingLayer):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            return self.inner(hidden, *args, **kwargs)

    model, calls = make("llama"), list[int]()
    stock = step(model)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        model.model.layers[index] = Outer(layer)
    enable(model)
    layers = checkpointable_layers(model)
    assert layers == checkpointed_layers(model) == list(model.model.layers)
    for levels, times in (([KEEP] * 4, 4), ([OFFLOAD] * 3 + [KEEP], 7)):
        calls.clear()
        with layer_levels(layers, levels) as offload:
            losses, found = step(model)
        assert_same((losses, {name.replace(".inner.", "."): value for name, value in found.items()}), stock)
        assert len(calls) == times
        assert offload is None or offload.use.most_held == 2 * 2 * 12 * 32 * 4
    assert all(layer.inner.gradient_checkpointing for layer in layers)
