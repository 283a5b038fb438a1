"""A plan of levels: products as the level says, bit-equal in any mix, the most that fits, and what is left to try."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from decoder_material import installed
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from offload_material import HOST, LAYERS, assert_same, loss_of, make, step
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack_trl.checkpointing.plan import Growth, LayerCosts, Level, Planner, checkpointable_layers, layer_levels

KEEP, CHECKPOINT, OFFLOAD = Level


class Products(TorchDispatchMode):
    """Counts matrix products and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self.calls["products"] += 1
        elif name.startswith("_scaled_dot_product") and not name.endswith("backward"):
            self.calls["attention"] += 1
        return func(*args, **(kwargs or {}))


def products(model: Any, levels: list[Level]) -> tuple[Counter[str], Counter[str]]:
    """Of the forward pass and of the backward pass."""
    with layer_levels(checkpointable_layers(model), levels, **HOST):
        with Products() as forward:
            loss = loss_of(model)
        with Products() as backward:
            loss.backward()
    model.zero_grad()
    return forward.calls, backward.calls


@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)])
def test_backward_computes_as_many_products_again_as_the_level_says(family: str, lora: bool) -> None:
    model = make(family, lora=lora)
    with installed(model, ours="moe" in family):
        found = {level: products(model, [level] * LAYERS) for level in Level}
        _, mixed = products(model, [CHECKPOINT] * (LAYERS - 1) + [KEEP])
    forward, keep = found[KEEP]
    per_layer = (forward["products"] - 1) // LAYERS  # but the head
    # Autograd needs no result of the last product of a layer, so the recompute ends before it.
    last = 1 + lora
    assert keep["attention"] == 0
    for level in (CHECKPOINT, OFFLOAD):
        _, backward = found[level]
        assert keep["products"] + LAYERS * (per_layer - last) <= backward["products"]
        assert backward["products"] <= keep["products"] + LAYERS * per_layer
        assert backward["attention"] == LAYERS
    full = found[CHECKPOINT][1]["products"]
    assert (full - keep["products"]) * (LAYERS - 1) == (mixed["products"] - keep["products"]) * LAYERS


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
            with layer_levels(layers, levels, **HOST) as offload:
                assert_same(step(model, 0, 1), stock)
                assert (offload is not None) == (OFFLOAD in levels)
                assert offload is None or offload.use.held == 0
    assert all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("kept", range(LAYERS))
def test_the_input_of_the_last_recomputed_layer_stays_on_the_device(kept: int) -> None:
    """While that layer runs, the input before its own is fetched: none is waited for from the beginning."""
    model = make("llama")
    levels = [OFFLOAD] * (LAYERS - kept) + [KEEP] * kept
    with layer_levels(checkpointable_layers(model), levels, **HOST) as offload:
        step(model)
        assert offload is not None
        assert offload.use.most_held == (LAYERS - kept - 1) * 2 * 12 * 32 * 4


def costs_of(layers: int, keep: int, inputs: int) -> LayerCosts:
    growth = {level: [Growth(0, size, 0)] * layers for level, size in zip(Level, (keep, inputs, 0), strict=True)}
    return LayerCosts(growth)


@examples(max_examples=200, deadline=None)
@example(layers=3, sizes=[0, 193], budget=675)
@given(
    layers=st.integers(1, 6), sizes=st.lists(st.integers(0, 1000), min_size=2, max_size=2), budget=st.integers(0, 8000)
)
def test_the_plan_keeps_the_most_last_layers_that_fit_and_offloads_only_if_checkpointing_does_not(
    layers: int, sizes: list[int], budget: int
) -> None:
    inputs, keep = sorted(sizes)
    planner = Planner(costs_of(layers, keep, inputs), budget, 1, 1)
    plan = planner.best()

    def fits(below: Level, kept: int) -> bool:
        return planner.peak_bytes([below] * (layers - kept) + [KEEP] * kept) <= budget

    assert plan.fits == fits(OFFLOAD, 0)
    assert list(plan.levels) == sorted(plan.levels, reverse=True)
    kept = plan.levels.count(KEEP)
    if plan.fits and kept < layers:
        below = plan.levels[0]
        assert not fits(below, kept + 1)
        assert below is CHECKPOINT or not fits(CHECKPOINT, 0)
    more: Any = Planner(planner.costs, budget + 500, 1, 1).best()
    assert max(more.levels) <= max(plan.levels)
    tried = [plan.levels]
    while (plan := planner.deeper(plan)) is not None:  # type: ignore[assignment]
        assert sum(map(int, plan.levels)) > sum(map(int, tried[-1]))
        tried.append(plan.levels)
    assert tried[-1] == (OFFLOAD,) * layers
    assert len(tried) <= layers.bit_length() + 3


def test_what_the_last_layers_keep_is_gone_when_the_first_are_computed_again() -> None:
    planner = Planner(costs_of(4, 100, 10), 0, 1, 1)
    assert planner.peak_bytes([KEEP] * 4) == 400 + 50
    assert planner.peak_bytes([CHECKPOINT] * 4) == 40 + 150
    assert planner.peak_bytes([OFFLOAD] * 3 + [KEEP]) == 10 + 150  # the kept input, and either of both, not their sum
    assert planner.peak_bytes([OFFLOAD] * 2 + [KEEP] * 2) == 10 + 200 + 50
    assert planner.peak_bytes([CHECKPOINT] * 3 + [KEEP]) == 30 + 150
    # What one layer works with is more if it was measured to be, e.g. a stack of experts that is made dense.
    much = Planner(replace(planner.costs, working=Growth(1000)), 0, 1, 1)
    assert (much.peak_bytes([KEEP] * 4), much.peak_bytes([CHECKPOINT] * 4)) == (1400, 40 + 100 + 1000)


def test_without_offload_the_last_plan_checkpoints_every_layer() -> None:
    growth = costs_of(6, 100, 10).growth
    planner = Planner(LayerCosts({level: growth[level] for level in (KEEP, CHECKPOINT)}), 0, 1, 1)
    assert planner.best().levels == (CHECKPOINT,) * 6
    kept = []
    plan: Any = planner.plan([KEEP] * 6)
    while plan is not None:
        kept.append(plan.levels.count(KEEP))
        plan = planner.deeper(plan)
    assert kept == [6, 3, 1, 0]
