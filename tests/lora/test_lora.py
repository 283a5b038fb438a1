"""`apply_lora` computes what PEFT computes, saves less for backward and leaves everything else to PEFT."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_operators import Counted
from lora_material import (
    adapted,
    any_ids,
    assert_trains_as_peft,
    gpt2,
    joint_error,
    products_in_backward,
    quantized,
    reference_projection,
    saved_bytes,
    step,
)
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from fastpack_trl import apply_lora
from fastpack_trl.lora.base_weight import BaseWeight
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

DENSE = ("llama", "qwen3", "gemma3_text", "phi3")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12), (0, 12)])
def test_projection_equals_the_reference_in_float64(bias: bool, dropped: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    leaves = {
        "x": torch.randn(*shape, dtype=torch.float64),
        "a": torch.randn(3, 12, dtype=torch.float64),
        "b": torch.randn(7, 3, dtype=torch.float64),
        "bias": torch.randn(7, dtype=torch.float64) if bias else None,
    }
    base = BaseWeight(torch.randn(7, 12, dtype=torch.float64))
    keep = torch.rand(shape, dtype=torch.float64)
    results = []
    for function in (lora_projection, reference_projection):
        own = {name: None if leaf is None else leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        x = own["x"]
        out = function(x, base, own["a"], own["b"], own["bias"], x * keep if dropped else None)
        out.square().sum().backward()
        results.append([out.detach(), *[leaf.grad for leaf in own.values() if leaf is not None]])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe", "gpt_oss"])
def test_training_equals_peft_over_20_steps_and_is_as_near_to_float64(family: str) -> None:
    models = [adapted(family), adapted(family)]
    assert apply_lora(models[1]).fast
    if family in DENSE:
        exact = adapted(family).double()
        for model in (exact, *models):
            step(model, any_ids())
        error, of_peft = (joint_error(gradients(model), gradients(exact)) for model in reversed(models))
        assert error <= 2 * of_peft
        for model in models:
            model.zero_grad()
    assert_trains_as_peft(*models, each_gradient=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.3},
        {"use_rslora": True, "r": 6},
        {"rank_pattern": {"q_proj": 2, "down_proj": 12}, "alpha_pattern": {"v_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"use_dora": True},
        {"lora_bias": True},
        {"target_modules": ["q_proj", "up_proj", "embed_tokens"]},
        {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_peft_give_its_gradients(settings: dict[str, Any]) -> None:
    stock = adapted(gpt2() if "fan_in_fan_out" in settings else "llama", **settings)
    models = [stock, copy.deepcopy(stock)]
    report = apply_lora(models[1])
    for model in models:
        torch.manual_seed(3)  # dropout
        step(model, any_ids())
    assert_gradients_close(gradients(models[1]), gradients(models[0]))
    others = {"use_dora": ["DoRA"], "target_modules": ["lora.Embedding"]}
    assert list(report.handed_over) == others.get(next(iter(settings)), [])


@pytest.mark.usefixtures("copies_fit")
def test_casts_and_copies_stay_where_nobody_keeps_the_report() -> None:
    model = adapted("llama")
    apply_lora(model, compute_dtype=torch.bfloat16)
    gc.collect()
    step(model, any_ids(), autocast=True)
    layers = [module for module in model.modules() if isinstance(module, FastLora)]
    assert layers
    assert all(layer.fastpack_cast.a.dtype == layer.fastpack_dense.weight.dtype == torch.bfloat16 for layer in layers)


def test_adapter_switch_disable_merge_and_unmerge_as_peft() -> None:
    models = [adapted("llama"), adapted("llama")]
    for model in models:
        torch.manual_seed(5)
        model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    apply_lora(models[1])
    ids = any_ids()

    def compare(what: str) -> None:
        losses = [float(step(model, ids)) for model in models]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6), what
        assert_gradients_close(gradients(models[1]), gradients(models[0]))
        for model in models:
            model.zero_grad()

    compare("first adapter")
    for model in models:
        model.set_adapter("other")
    compare("second adapter")
    for model in models:
        model.base_model.set_adapter(["default", "other"])
    compare("two adapters at once")
    for model in models:
        model.set_adapter("default")
        model.merge_adapter()
    with torch.no_grad():
        merged = [model(input_ids=ids).logits for model in models]
    torch.testing.assert_close(merged[1], merged[0])
    for model in models:
        model.unmerge_adapter()
    compare("unmerged")
    with models[0].disable_adapter(), models[1].disable_adapter(), torch.no_grad():
        torch.testing.assert_close(models[1](input_ids=ids).logits, models[0](input_ids=ids).logits, rtol=0, atol=0)
    mixed = {"input_ids": torch.cat([ids, any_ids(seed=1)]), "adapter_names": ["default", "other"]}
    assert torch.equal(*(model.eval()(**mixed).logits for model in models))


def test_saved_adapters_are_pefts(tmp_path: Path) -> None:
    stock, fast = adapted("llama"), adapted("llama")
    apply_lora(fast)
    assert fast.state_dict().keys() == stock.state_dict().keys()
    fast.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=any_ids()).logits, stock.eval()(input_ids=any_ids()).logits)


def test_evaluation_and_generation_between_steps_are_bit_equal_to_peft() -> None:
    models = [adapted("qwen3"), adapted("qwen3")]
    apply_lora(models[1])
    results = []
    for model in models:
        step(model, any_ids())
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=any_ids(seed=2)).logits
        tokens = model.generate(input_ids=any_ids(length=5), max_new_tokens=4, do_sample=False)
        model.train()
        again = model.generate(input_ids=any_ids(length=5), max_new_tokens=4, do_sample=False)  # in an accumulated step
        assert torch.equal(again, tokens)
        loss = step(model, any_ids())
        results.append((logits, tokens, loss))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert float(results[1][2]) == pytest.approx(float(results[0][2]), rel=1e-6)


def test_adapters_that_a_fused_optimizer_changed_are_cast_again_in_the_model_and_in_a_layer_alone() -> None:
    """TRL's default optimizer; fused steps leave the version of a parameter as it is."""
    models = [adapted("llama"), adapted("llama")]
    apply_lora(models[1], compute_dtype=torch.bfloat16)
    outputs = []
    for model in models:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10, fused=True)
        with torch.autocast("cpu", torch.bfloat16):  # two forwards before their backward passes
            losses = [model(input_ids=any_ids(seed=s), labels=any_ids(seed=s), use_cache=False).loss for s in (0, 1)]
        for loss in losses:
            loss.backward()
        projection = model.base_model.model.model.layers[0].self_attn.q_proj
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            alone = projection(torch.ones(2, 32))  # past the backbone
            model(input_ids=any_ids())  # with gradients that nobody asks for
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):  # another one: autocast keeps its casts of parameters until its end
            outputs.append((alone, model(input_ids=any_ids()).logits))
    assert joint_error(gradients(models[1]), gradients(models[0])) < 0.03
    for fast, stock in zip(*reversed(outputs), strict=True):
        assert float((fast - stock).norm() / stock.norm()) < 0.05


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_cast_once_per_step_and_not_per_layer(checkpointing: bool) -> None:
    casts = []
    for layers in (1, 3):
        model = adapted("llama", dtype=torch.bfloat16, num_hidden_layers=layers)
        for name, parameter in model.named_parameters():
            assert (parameter.dtype == torch.float32) == ("lora_" in name)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_lora(model)
        with Counted(lambda name, args: name == "_to_copy" and args[0].dim() == 2 and 8 in args[0].shape) as counted:
            step(model, any_ids(), autocast=True)
        casts.append(counted.count)
        assert all(p.grad.dtype == torch.float32 for n, p in model.named_parameters() if "lora_" in n)
    assert casts == [0, 0]


def test_the_input_of_several_projections_is_saved_once() -> None:
    """Beside one input per q/k/v, o, gate/up and down only x A^T and the adapters are kept, no fp32 copy of either."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    tokens, kept = 512, {}
    for name in ("none", "stock", "fast"):
        per_layers = []
        for layers in (1, 3):
            model = adapted("qwen3", dtype=torch.bfloat16, num_hidden_layers=layers, **shape)
            if name == "fast":
                apply_lora(model)
            elif name == "none":
                model = model.unload()
            per_layers.append(saved_bytes(model, any_ids(length=tokens)))
        kept[name] = (per_layers[1] - per_layers[0]) // 2
    # Inputs of q/k/v, gate/up and down; that of o is the output of attention, which its backward keeps anyway.
    inputs = 2 * tokens * (256 + 256 + 768)
    thin = 2 * 8 * (7 * tokens + 3 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 768))
    assert kept["fast"] - kept["none"] <= inputs + 1.1 * thin
    assert kept["stock"] - kept["none"] >= 1.7 * (kept["fast"] - kept["none"])


def test_recompute_of_a_checkpointed_layer_leaves_its_last_base_product_out() -> None:
    """The base product of `down_proj` runs once per step: its forward, and no second time for the backward pass."""
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256}
    counts = {}
    for name in ("stock", "fast"):
        model = adapted("llama", target_modules=["down_proj"], **shape)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if name == "fast":
            apply_lora(model)
        counts[name] = products_in_backward(model, any_ids(length=32), width=256)
    # dX of the base; the thin products of the adapter are counted apart.
    assert counts["stock"] == counts["fast"] + 1, counts


def test_revert_gives_every_layer_its_class_back_and_a_second_call_takes_nothing_back() -> None:
    model = adapted("llama")
    before = [type(module) for module in model.modules()]
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    report = apply_lora(model)
    second = apply_lora(model)
    assert not second.fast
    assert str(second) == f"{len(report.fast)} LoRA layers have the fast forward already"
    second.revert()
    assert any(isinstance(module, FastLora) for module in model.modules())
    step(model, any_ids())
    report.revert()
    report.revert()
    assert [type(module) for module in model.modules()] == before
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks


@pytest.mark.parametrize("make", [lambda: adapted("llama"), quantized], ids=["dense", "nf4"])
def test_copies_and_pickles_of_a_model_in_training_go_on_working(make: Callable[[], Any]) -> None:
    model = make()
    report = apply_lora(model)
    expected = float(step(model, any_ids()))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    report.revert()
    for twin in twins:
        twin.zero_grad()
        assert float(step(twin, any_ids())) == pytest.approx(expected, rel=1e-6)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Stored(Tensor):
    """A weight in a storage format of its own, as torchao's."""


UNCOVERED: dict[str, Callable[[Any], object]] = {
    "trainable base": lambda layer: layer.base_layer.weight.requires_grad_(),
    "hook on the base": lambda layer: layer.base_layer.register_forward_hook(lambda _module, _args, out: out * 2),
    "unknown base": lambda layer: setattr(layer.base_layer, "__class__", Doubling),
    "unknown weight": lambda layer: setattr(
        layer.base_layer, "weight", nn.Parameter(layer.base_layer.weight.data.as_subclass(Stored), requires_grad=False)
    ),
    "adapters in another dtype": lambda layer: (layer.lora_A.float(), layer.lora_B.float()),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_is_not_covered_runs_as_peft_bit_for_bit(name: str) -> None:
    models = [adapted("llama"), adapted("llama")]
    for model in models:
        model.to(torch.bfloat16 if "dtype" in name else torch.float32)
        for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
            UNCOVERED[name](layer)
    report = apply_lora(models[1])
    for model in models:
        step(model, any_ids())
    expected, found = map(gradients, models)
    assert all(torch.equal(grad, found[parameter]) for parameter, grad in expected.items())
    assert bool(report.handed_over) == ("unknown" in name or name == "hook on the base")


def test_a_model_without_lora_is_left_alone() -> None:
    assert {str(apply_lora(model)) for model in (tiny_model("llama"), nn.Linear(2, 2))} == {"no LoRA layers"}
