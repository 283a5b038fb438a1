"""The most that layers hold at once, predicted from a few tokens: what backward works with beside what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_material import decoder, installed
from offload_material import enable
from peft import LoraConfig, get_peft_model

from fastpack_trl.checkpointing.plan import (
    WORKING_SHARE,
    Growth,
    LayerCosts,
    Level,
    Planner,
    checkpointable_layers,
    layer_levels,
)
from fastpack_trl.checkpointing.trace import LiveBytes, trace_levels
from fastpack_trl.model.aside import run_aside
from fastpack_trl.moe.quantised import quantize_experts
from fastpack_trl.testing import tiny_model

LAYERS, EXPERTS, WIDTH, INNER = 2, 8, 64, 256
STACK = EXPERTS * WIDTH * INNER * 2 * 4
"""Bytes of a dense gate and up projection."""


def model_of(family: str) -> Any:
    experts = {"num_local_experts" if family == "gpt_oss" else "num_experts": EXPERTS}
    inner = {"intermediate_size" if family == "gpt_oss" else "moe_intermediate_size": INNER}
    model = tiny_model(family, num_hidden_layers=LAYERS, hidden_size=WIDTH, **(experts | inner))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()
    return enable(model)


def test_bytes_are_counted_from_birth_to_death_and_views_and_results_in_place_are_no_new_ones() -> None:
    before = torch.ones(5, dtype=torch.float64)
    with LiveBytes() as live:
        a = torch.ones(100, dtype=torch.float64)
        b = a.view(10, 10).t().add_(1)
        before.mul_(2)
        assert live.peak == 800
        c = a + 1
        assert live.peak == 1600
        del a, b
        d = c + 1
        assert live.peak == 1600
        e = torch.cat([c, d])
        assert live.peak == 3200
        del c, d, e
        _ = before + 1
        assert live.peak == 3200


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_peak_over_stacks_of_experts_is_predicted_within_a_tenth(family: str, packed: bool) -> None:
    model = model_of(family)
    if packed:
        pytest.importorskip("bitsandbytes")
        quantize_experts(model)
    layers = checkpointable_layers(model)
    with installed(model):
        run = decoder(model, 1)
        costs, _ = trace_levels(model, layers, run)
        # Where what a token adds is worked with at another moment, stacks that are made dense are hidden by it.
        assert (costs.working.constant > STACK / 2) == (packed and family == "qwen3_moe")
        for level in (Level.KEEP, Level.CHECKPOINT):
            plan = Planner(costs, 0, tokens=600, longest=600).plan([level] * LAYERS)
            with run_aside(model, training=True), layer_levels(layers, [level] * LAYERS), LiveBytes() as live:
                leaf, hidden = run(600)
                torch.autograd.grad(hidden.float().sum(), leaf)
                del leaf, hidden
            assert plan.predicted == pytest.approx(live.peak, rel=0.1)


def test_a_peak_has_what_is_worked_with_where_that_is_more_than_the_share_of_a_layer() -> None:
    growth = {Level.KEEP: [Growth(0, 10)] * 2, Level.CHECKPOINT: [Growth(0, 1)] * 2}
    none = dict.fromkeys(growth, 0.0)
    few, much = (Planner(LayerCosts(growth, none, none, Growth(constant)), 0, 4, 4) for constant in (5, 1000))
    keep, checkpoint = [Level.KEEP] * 2, [Level.CHECKPOINT] * 2
    assert few.peak_bytes(keep) == 80 + 40 * (WORKING_SHARE - 1)
    assert (much.peak_bytes(keep), much.peak_bytes(checkpoint)) == (1080, 8 + 40 + 1000)
