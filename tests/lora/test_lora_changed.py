"""Changes by others to a LoRA layer during training reach the fast forward as they reach PEFT's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import adapted, any_ids, joint_error, quantized, step
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from trainer_material import assert_same_log, both, build, callback, train

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.recipe.train import _last_line
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model


def projection(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj


def halve(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def other_forward(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True).expand(*x.shape[:-1], 32)


def merge_and_start_again(model: Any) -> None:
    """ReLoRA: the base takes what the adapters learnt, and new ones begin."""
    for layer in model.modules():
        if hasattr(layer, "lora_A") and "default" in layer.lora_A:
            layer.merge()
            layer.merged_adapters.clear()
            layer.lora_B["default"].weight.data.zero_()


def other_storage(model: Any) -> None:
    weight = projection(model).base_layer.weight
    weight.data = weight.data * 1.5


CHANGES: dict[str, Callable[[Any], Any]] = {
    "merged by ReLoRA": merge_and_start_again,
    "other data of a frozen weight": other_storage,
    "hook on lora_A": lambda model: projection(model).lora_A["default"].register_forward_hook(halve),
    "hook on lora_B": lambda model: projection(model).lora_B["default"].register_forward_hook(halve),
    "hook on the base": lambda model: projection(model).base_layer.register_forward_hook(halve),
    "hook on a gradient": lambda model: projection(model).base_layer.register_full_backward_hook(
        lambda _module, inputs, _out: (inputs[0] * 2,)
    ),
    "forward of lora_B": lambda model: setattr(projection(model).lora_B["default"], "forward", other_forward),
    "forward of the base": lambda model: setattr(projection(model).base_layer, "forward", other_forward),
    "parametrized adapter": lambda model: weight_norm(projection(model).lora_A["default"]),
}


@pytest.mark.usefixtures("copies_fit")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_step_is_seen(change: str) -> None:
    found: list[tuple[float, dict[str, Tensor]]] = []
    for fast in (False, True):
        model = adapted("llama")
        if fast:
            apply_lora(model, compute_dtype=torch.bfloat16)
        step(model, any_ids(), autocast=True)
        CHANGES[change](model)
        model.zero_grad()
        found.append((float(step(model, any_ids(seed=1), autocast=True)), gradients(model)))
    (expected_loss, expected), (loss, actual) = found
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert joint_error(actual, expected) < 0.03


def test_a_frozen_weight_changed_before_its_backward_is_an_error() -> None:
    model = adapted("llama")
    apply_lora(model)
    loss = model(input_ids=any_ids(), labels=any_ids(), use_cache=False).loss
    with torch.no_grad():
        projection(model).base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


SHORT: dict[str, Any] = {"packing": True, "max_steps": 3, "eval_strategy": "no"}


@pytest.mark.parametrize("kind", ["bf16 base", "4-bit base"])
def test_adapters_in_a_dtype_that_no_input_has_are_pefts_from_the_start(kind: str, tmp_path: Path) -> None:
    """Without autocast: PEFT makes adapters in fp32 over a 16-bit base, TRL casts those over a 4-bit base to bf16."""
    model = adapted("llama", dtype=torch.bfloat16) if kind == "bf16 base" else quantized()
    for parameter in model.parameters() if kind == "4-bit base" else ():
        parameter.data = parameter.data.bfloat16() if parameter.requires_grad else parameter.data
    ours = train(FastSFTTrainer, tmp_path, model=model, **SHORT)
    line = ours.fastpack_report["lora"]
    assert (line.status, line.path) == ("stock", "PEFT")
    assert re.match(r"adapters in torch\.b?float\d+, others in torch\.b?float\d+; bf16=True would be fast", line.reason)
    assert "run by TRL: lora" in _last_line(ours)
    with pytest.raises(ValueError, match="lora='on': adapters in torch"):
        train(FastSFTTrainer, tmp_path, model=model, **SHORT, fast={"lora": "on"})


@pytest.mark.parametrize("kind", ["lora", "expert LoRA", "experts"])
def test_later_handovers_are_reported_at_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    if kind == "lora":
        feature, text, model = "lora", "peft (hooks on a part", adapted("llama")
        module = projection(model).lora_A.default
    else:
        lora = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
        model = tiny_model("qwen3_moe") if kind == "experts" else adapted("qwen3_moe", **lora)
        feature, text = "moe", "peft (hooks" if kind == "expert LoRA" else "transformers' experts run"
        module = next(one.act_fn for one in experts_modules(model).values())

    def act(state: Any, _model: Any) -> None:
        if state.global_step == 1:
            module.register_forward_hook(lambda *_: None)

    def look(state: Any, _model: Any) -> None:
        seen.append(trainer.fastpack_report[feature].reason)

    trainer = build(FastSFTTrainer, tmp_path, model=model, **SHORT)
    trainer.add_callback(callback("on_step_begin", act)())
    trainer.add_callback(callback("on_step_end", look, "Looks")())
    trainer.train()
    assert [text in reason for reason in seen] == [False, True, True]
    messages = {id(record): record.getMessage() for record in caplog.records}.values()
    assert sum(text in message for message in messages) == 1, caplog.text
    assert trainer.fastpack_report[feature].status == "on"
    assert f"in part by TRL: {feature}" in _last_line(trainer)
    assert text in json.loads((tmp_path / "fastpack_report.json").read_text())["features"][feature]["reason"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("alpha", [8, 16], ids=["scaled by 1", "scaled by 2"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_every_adapter_is_ready_once_in_a_backward_pass(reentrant: bool, alpha: int, autocast: bool) -> None:
    """DDP and ZeRO reduce a gradient when this hook is called: with none there yet, it would never be reduced."""
    sides = []
    for fast in (False, True):
        model = adapted("llama", dtype=torch.bfloat16 if autocast else torch.float32, num_hidden_layers=3)
        for module in model.modules():
            if hasattr(module, "lora_alpha"):
                module.scaling["default"] = alpha / 8
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        if fast:
            assert apply_lora(model).fast
        ready: dict[str, list[bool]] = {}
        held = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                node, calls = parameter.expand_as(parameter).grad_fn.next_functions[0][0], ready.setdefault(name, [])
                node.register_hook(lambda *_, calls=calls, p=parameter: calls.append(p.grad is not None))
                held.append(node)
        step(model, any_ids(), autocast=autocast)
        assert ready
        assert set(map(tuple, ready.values())) == {(True,)}
        sides.append(gradients(model))
    if not autocast:
        assert_gradients_close(sides[1], sides[0])


def test_a_run_whose_checkpoints_change_casts_together_where_it_may() -> None:
    model = adapted("llama", dtype=torch.bfloat16, num_hidden_layers=2)
    model.enable_input_require_grads()
    apply_lora(model)
    layers = [module for module in model.modules() if hasattr(module, "fastpack_cast")]
    for keywords, together in (({"use_reentrant": True}, False), ({"use_reentrant": False}, True)):
        model.gradient_checkpointing_enable(keywords)
        step(model, any_ids(), autocast=True)
        assert {layer.fastpack_cast is not None for layer in layers} == {together}
    model.gradient_checkpointing_enable({"use_reentrant": True})
    for decoder_layer in model.get_decoder().layers:  # as a plan that keeps them: the decoder has its flag all the same
        decoder_layer.gradient_checkpointing = False
    step(model, any_ids(), autocast=True)
    assert all(layer.fastpack_cast is not None for layer in layers)


def user_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = outputs.logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


def test_trl_may_run_the_model_again_without_gradients_before_the_backward_pass(tmp_path: Path) -> None:
    """As beside `compute_loss_func`: what a checkpoint recomputes still reads the casts of its forward."""
    model = adapted("llama", lora_alpha=8, alpha_pattern={"q_proj": 16, "down_proj": 4})
    options = SHORT | {"max_steps": 4, "gradient_accumulation_steps": 2, "trainer": {"compute_loss_func": user_loss}}
    assert_same_log(*both(tmp_path, model=model, fast={"activation_memory": "checkpoint"}, **options))


def test_a_forward_without_gradients_reads_no_cast_of_before_the_step() -> None:
    """Fused optimizers do not count versions up; compiled layers guard on none of them either."""
    model = adapted("llama")
    apply_lora(model)
    step(model, any_ids())
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    with torch.no_grad():
        expected = adapted("llama")
        expected.load_state_dict(model.state_dict())
        logits = expected(input_ids=any_ids(), use_cache=False).logits
        torch.testing.assert_close(model(input_ids=any_ids(), use_cache=False).logits, logits)
        for layer in model.base_model.model.model.layers:
            layer.compile(backend="eager")
        torch.testing.assert_close(model(input_ids=any_ids(), use_cache=False).logits, logits)
