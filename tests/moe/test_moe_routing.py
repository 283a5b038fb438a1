"""Routing plans: each forward sorts once; what `apply_moe` puts on a model lives, is copied and dies with it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_material import adapted, input_ids, moe_model, step

from fastpack_trl import apply_moe
from fastpack_trl.moe import block
from fastpack_trl.moe.routing import routing_plan
from fastpack_trl.testing import assert_gradients_close, gradients


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 40), experts=st.integers(1, 9), top_k=st.integers(1, 4), seed=st.integers(0, 99))
def test_plan_groups_slots_by_expert_keeps_order_and_inverts(tokens: int, experts: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)  # more slots than experts included
    plan = routing_plan(ids, experts)
    flat = ids.reshape(-1).tolist()
    assert plan.perm.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])
    assert plan.expert.tolist() == sorted(flat)
    assert plan.offsets.tolist() == [sum(e <= expert for e in flat) for expert in range(experts)]
    assert plan.token.tolist() == [slot // top_k for slot in plan.perm.tolist()]
    assert plan.inverse.shape == ids.shape
    assert plan.perm.index_select(0, plan.inverse.reshape(-1)).tolist() == list(range(len(flat)))
    assert {tensor.dtype for tensor in plan} == {torch.int32}
    assert torch.equal(plan.ids, ids.int())


def train_on_two_batches(model: Any, order: str) -> dict[str, torch.Tensor]:
    """Gradients of two batches, forward (f) and backward (b) in an order."""
    model.zero_grad()
    batches, losses = [input_ids(seed=1), input_ids(tokens=17, seed=2)], []
    for action in order:
        if action == "f":
            ids = batches.pop(0)
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        else:
            losses.pop(0 if action == "b" else -1).backward()
    return gradients(model)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("order", ["ffbb", "ffBB", "fbfb"])
def test_tokens_are_sorted_once_per_layer_in_each_forward(order: str, reentrant: bool | None, lora: bool) -> None:
    model = adapted("gpt_oss") if lora else moe_model("qwen3_moe")
    model.enable_input_require_grads()
    expected = train_on_two_batches(model, order)
    with apply_moe(model), patch.object(block, "routing_plan", wraps=block.routing_plan) as sorts:
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # after: as a trainer does
        assert_gradients_close(train_on_two_batches(model, order), expected, rtol=1e-5)
        assert sorts.call_count == 2 * 2 * (1 if reentrant is None else 2)  # layers x forwards


def test_what_runs_on_a_model_stays_if_nobody_keeps_the_report() -> None:
    model = adapted()
    apply_moe(model)
    gc.collect()
    with patch.object(block, "routing_plan", wraps=block.routing_plan) as sorts:
        step(model)
    assert sorts.call_count == 2
    wrappers = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    assert ["forward" in vars(wrapper) for wrapper in wrappers].count(True) == 2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
def test_a_model_is_pickled_and_copied_while_its_experts_are_ours(lora: bool) -> None:
    model = adapted() if lora else moe_model("qwen3_moe")
    with apply_moe(model):
        logits = model(input_ids=input_ids(), use_cache=False).logits
        twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for twin in twins:
        found = twin(input_ids=input_ids(), use_cache=False).logits
        torch.testing.assert_close(found, logits)
        found.sum().backward()
