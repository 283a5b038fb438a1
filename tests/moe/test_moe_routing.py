"""The routing plan and the tape that carries it into a checkpoint's recompute."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_material import adapted, assert_as_stock, experts_of, input_ids, moe_model, routed, step
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from fastpack_trl.checkpointing.offload import checkpointed_layers, offload_checkpoints
from fastpack_trl.checkpointing.streams import HostStreams
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.routing import PlanKeeper, PlanTape, routing_plan
from fastpack_trl.testing import assert_gradients_close, gradients


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 40), experts=st.integers(1, 9), top_k=st.integers(1, 4), seed=st.integers(0, 99))
def test_plan_groups_slots_by_expert_keeps_their_order_and_inverts(
    tokens: int, experts: int, top_k: int, seed: int
) -> None:
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
    assert {tensor.dtype for tensor in plan.tensors()} == {torch.int32}
    assert plan.matches(ids)


def test_example_of_the_docstring() -> None:
    plan = routing_plan(torch.tensor([[1, 0], [1, 2]]), 3)
    assert [tensor.tolist() for tensor in plan.tensors()] == [[1, 0, 2, 3], [[1, 0], [2, 3]], [0, 1, 1, 2], [1, 3, 4]]
    assert plan.token.tolist() == [0, 0, 1, 1]


def test_tape_replays_in_order_and_makes_what_a_forward_that_stopped_did_not() -> None:
    keeper = PlanKeeper(4)
    keeper.tape = PlanTape()
    first, _ = routed(5, 2, 4, seed=1)
    second, _ = routed(5, 2, 4, seed=2)
    plans = [keeper.plan(first), keeper.plan(second)]
    keeper.tape.place = 0
    assert [keeper.plan(first), keeper.plan(second)] == plans
    assert keeper.plan(first) not in plans  # a third block: its forward never ran
    assert keeper.sorts == 3


def test_check_names_a_recompute_that_routes_differently() -> None:
    keeper = PlanKeeper(4, check=True)
    keeper.tape = PlanTape()
    keeper.plan(torch.tensor([[0, 1], [2, 3]]))
    keeper.tape.place = 0
    with pytest.raises(RuntimeError, match="routed tokens to other experts than its forward"):
        keeper.plan(torch.tensor([[0, 1], [3, 2]]))


def _losses(model: torch.nn.Module) -> list[torch.Tensor]:
    batches = [input_ids(seed=1), input_ids(seed=2)]
    return [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("order", ["ffbb", "ffbb-reversed", "fbfb"])
def test_one_sort_per_layer_and_forward_and_the_recompute_finds_its_own_plan(order: str, reentrant: bool) -> None:
    model = moe_model("qwen3_moe")
    model.enable_input_require_grads()
    for loss in _losses(model):
        loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with apply_moe(model, check_plans=True) as report:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # after: as a trainer does
        if order == "fbfb":
            for seed in (1, 2):
                ids = input_ids(seed=seed)
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            losses = _losses(model)
            for loss in losses if order == "ffbb" else losses[::-1]:
                loss.backward()
        assert report.sorts == 2 * 2  # layers x forwards; none in the recompute
        assert_gradients_close(gradients(model), expected)


def _with_lora(lora: bool) -> Any:
    model = moe_model("qwen3_moe")
    model.enable_input_require_grads()
    config = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"])
    return get_peft_model(model, config) if lora else model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
def test_the_model_keeps_what_runs_on_it_where_nobody_keeps_the_report(lora: bool) -> None:
    model = _with_lora(lora)
    apply_moe(model)
    gc.collect()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step(model)
    keepers = [module._fastpack_moe.keeper for module in model.modules() if hasattr(module, "_fastpack_moe")]
    assert [keeper.sorts for keeper in keepers] == [1, 1]  # one per layer, none in the recompute
    wrappers = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    assert len(wrappers) == 2 * lora
    assert all("forward" in vars(wrapper) for wrapper in wrappers)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "expert-lora"])
def test_nothing_is_left_after_revert_nor_of_a_model_that_is_gone(lora: bool) -> None:
    model = _with_lora(lora)
    gc.collect()  # models of other tests, with what they keep on the same classes
    classes = {type(module) for module in model.modules()}
    before = [set(vars(module)) for module in model.modules()], {kind: set(vars(kind)) for kind in classes}
    for applied in range(2):  # reverted, then dropped together with the model
        report = apply_moe(model)
        assert [set(vars(module)) for module in model.modules()] != before[0]
        assert {kind: set(vars(kind)) for kind in classes} != before[1]
        if not applied:
            held = weakref.ref(report._stack)
            report.revert()
            assert [set(vars(module)) for module in model.modules()] == before[0]
            del report
            assert held() is None
    del report, model
    gc.collect()
    assert {kind: set(vars(kind)) for kind in classes} == before[1]


def test_an_aborted_step_leaves_nothing_for_the_next_one() -> None:
    model = moe_model("qwen3_moe")
    expected = step(model)
    with apply_moe(model, check_plans=True):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=input_ids(seed=5), use_cache=False)
        hook.remove()
        assert experts_of(model)._fastpack_moe.keeper.tape is None
        model(input_ids=input_ids(tokens=7, seed=6), use_cache=False)  # a forward whose backward never comes
        assert_as_stock(model, expected)


@pytest.mark.parametrize("last", ["offload", "moe"])
def test_offloaded_checkpoints_compose_and_either_may_be_taken_off_first(last: str) -> None:
    model = moe_model("qwen3_moe")
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = checkpointed_layers(model)
    before = [layer._gradient_checkpointing_func for layer in layers]
    report = None if last == "moe" else apply_moe(model, check_plans=True)
    with offload_checkpoints(layers, "double_buffer", min_bytes=1, keep_last=0, streams=HostStreams):
        report = report or apply_moe(model, check_plans=True)
        assert_as_stock(model, expected)
        assert report.sorts == 2
        if last == "offload":
            report.revert()
    report.revert()
    assert [layer._gradient_checkpointing_func for layer in layers] == before


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_a_model_is_pickled_while_its_experts_are_ours(checkpointing: bool) -> None:
    model = moe_model("qwen3_moe")
    if checkpointing:  # not through the model's method, whose own hook on the embeddings no pickle takes
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    with apply_moe(model):
        logits = model(input_ids=input_ids(), use_cache=False).logits
        again = pickle.loads(pickle.dumps(model))
        found = again(input_ids=input_ids(), use_cache=False).logits
    assert torch.equal(found, logits)
    found.sum().backward()
    if checkpointing:
        assert again.model.layers[0]._gradient_checkpointing_func.func is checkpoint


def test_a_model_with_lora_on_its_experts_is_pickled_while_they_are_ours() -> None:
    model = adapted()
    with apply_moe(model):
        logits = model(input_ids=input_ids(), use_cache=False).logits
        again = pickle.loads(pickle.dumps(model))
        copied = copy.deepcopy(model)
    for one in (again, copied):
        torch.testing.assert_close(one(input_ids=input_ids(), use_cache=False).logits, logits)


def test_a_copy_of_the_model_has_stocks_checkpointing_and_so_has_the_model_afterwards() -> None:
    model = moe_model("qwen3_moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = list(model.model.layers)
    before = [layer._gradient_checkpointing_func for layer in layers]
    with apply_moe(model):
        model(input_ids=input_ids(), use_cache=False)
        assert [layer._gradient_checkpointing_func for layer in layers] != before
        copied = copy.deepcopy(model)
        assert copied.model.layers[0]._gradient_checkpointing_func.func is before[0].func
        copied(input_ids=input_ids(), use_cache=False).logits.sum().backward()
    assert [layer._gradient_checkpointing_func for layer in layers] == before
