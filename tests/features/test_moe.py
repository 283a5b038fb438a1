"""The `moe` switch of `FastSFTTrainer`, and the auxiliary loss, beside stock TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_material import hybrid_model
from moe_material import STACKS, distance, moe_model
from peft import LoraConfig
from torch import Tensor
from trainer_material import assert_line, assert_same_log, both, build, make_tokenizer, train
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.step.load_balancing import load_balancing_losses

NO_NUM_EXPERTS = ("deepseek_v3", "glm4_moe", "granitemoe")
ONE_STEP: dict[str, Any] = {"packing": True, "max_steps": 1, "eval_strategy": "no"}


@pytest.mark.parametrize(("peft", "checkpointing"), [(False, False), (True, True)], ids=["full", "expert-lora"])
def test_training_log_equals_stock(tmp_path: Path, peft: bool, checkpointing: bool) -> None:
    ours, stock = both(
        tmp_path, family="qwen3_moe", packing=True, gradient_checkpointing=checkpointing, learning_rate=1e-4,
        save_strategy="steps", save_steps=2,
        trainer={"peft_config": LoraConfig(r=4, target_parameters=STACKS, target_modules=["q_proj"])} if peft else None,
    )  # fmt: skip
    assert_same_log(ours, stock, rtol=5e-5, atol=1e-5)
    line = ours.fastpack_report["moe"]
    assert (line.status, line.path) == ("on", "fastpack"), line
    assert ("LoRA on the experts of 2" in line.reason) == peft
    assert "load-balancing loss with coefficient 0.001" in ours.fastpack_report["sync_free"].reason
    name = "checkpoint-2/adapter_config.json" if peft else "checkpoint-2/config.json"
    assert len({(tmp_path / side / name).read_text(encoding="utf-8") for side in ("ours", "stock")}) == 1
    assert not any(hasattr(module, "_fastpack_moe") for module in ours.model.modules())


@pytest.mark.parametrize("family", NO_NUM_EXPERTS)
def test_auxiliary_loss_works_where_stock_raises(family: str, tmp_path: Path) -> None:
    model = moe_model(family, vocab_size=96)
    if not hasattr(model.config, "output_router_logits") or not _router_logits(model):
        pytest.skip(f"this transformers records no router logits of {family}")
    options: dict[str, Any] = {"packing": True, "router_aux_loss_coef": 0.05, "max_steps": 2}
    # Evaluation with predictions runs trl's own forward.
    options["trainer"] = {"compute_metrics": lambda _: {"one": 1.0}}
    with pytest.raises(AttributeError, match="num_experts"):
        train(SFTTrainer, tmp_path / "stock", model=moe_model(family, vocab_size=96), **options)
    ours = train(FastSFTTrainer, tmp_path / "ours", model=moe_model(family, vocab_size=96), **options)
    losses = [row["aux_loss"] for row in ours.state.log_history if "aux_loss" in row]
    assert len(losses) == 2
    assert all(1 < loss < 4 for loss in losses)  # top-k of balanced routing is k = 2
    assert "load-balancing loss with coefficient 0.05" in ours.fastpack_report["sync_free"].reason
    assert not hasattr(ours.model.config, "num_experts")


def _router_logits(model: Any) -> Any:
    return model.base_model(input_ids=torch.tensor([[5, 6]]), output_router_logits=True, use_cache=False).router_logits


def test_reentrant_checkpointing_is_warned_about(tmp_path: Path) -> None:
    ours = train(FastSFTTrainer,
        tmp_path, family="qwen3_moe", packing=True, gradient_checkpointing=True, max_steps=1,
        eval_strategy="no", gradient_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    assert "reentrant checkpointing drops its gradient" in ours.fastpack_report["sync_free"].reason


@pytest.mark.parametrize(
    ("setting", "asked", "status", "said"),
    [
        ("off", None, "off", "switched off"),
        ("auto", "batched_mm", "stock", "experts_implementation='batched_mm' was chosen"),
        ("on", "batched_mm", "on", "2 of 2 layers"),
    ],
)
def test_switch_and_the_users_choice(tmp_path: Path, setting: str, asked: str | None, status: str, said: str) -> None:
    model = moe_model("mixtral")
    if asked is not None:
        model.set_experts_implementation(asked)
    ours = train(FastSFTTrainer, tmp_path, model=model, fast={"moe": setting}, **ONE_STEP)
    assert_line(ours, "moe", said, status=status)
    assert ours.model.config._experts_implementation == (asked or "grouped_mm")


@pytest.mark.parametrize(("setting", "peft"), [("auto", True), ("off", False)])
def test_experts_without_a_gate_train_and_evaluate_as_stock(tmp_path: Path, setting: str, peft: bool) -> None:
    trainer = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])} if peft else None
    stock = train(SFTTrainer, tmp_path / "stock", model=hybrid_model("nemotron_h"), trainer=trainer)
    ours = train(
        FastSFTTrainer, tmp_path / "ours", model=hybrid_model("nemotron_h"), trainer=trainer, fast={"moe": setting}
    )
    assert_same_log(ours, stock)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)
    assert ("lora" in ours.fastpack_report) == peft
    line = ours.fastpack_report["moe"]
    assert (line.status, line.path) == ("off" if setting == "off" else "stock", "stock")
    assert line.reason == ("switched off" if setting == "off" else "1 layer (experts without a gate)")


def test_on_evaluates_as_stock_and_stops_training_where_no_layer_has_a_gate(tmp_path: Path) -> None:
    ours = build(FastSFTTrainer, tmp_path, model=hybrid_model("nemotron_h"), fast={"moe": "on"})
    stock = build(SFTTrainer, tmp_path, model=hybrid_model("nemotron_h"))
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"^moe='on': 1 layer \(experts without a gate\); set moe='auto' to train"):
        ours.train()
    assert ours.state.global_step == 0


def test_experts_implementation_given_for_a_model_by_name_is_respected(tmp_path: Path) -> None:
    moe_model("mixtral").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    own = {"experts_implementation": "grouped_mm", "dtype": "float32"}
    trainer = train(FastSFTTrainer, tmp_path / "run", model=str(tmp_path / "model"), model_init_kwargs=own, **ONE_STEP)
    assert trainer.fastpack_report["moe"].reason == "experts_implementation='grouped_mm' was chosen"


def _logits(dtype: torch.dtype, layers: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(20, 8).to(dtype).requires_grad_() for _ in range(layers)]


def _losses(logits: list[Tensor], parts: list[int] | Tensor, top_k: int = 2) -> Tensor:
    return load_balancing_losses(tuple(logits), top_k, parts)


@pytest.mark.parametrize("counted", [20, 13], ids=["all", "padded"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_auxiliary_loss_and_gradient_equal_stock(top_k: int, counted: int) -> None:
    logits = _logits(torch.float32)
    expected = load_balancing_loss_func(tuple(logits), 8, top_k, (torch.arange(20) < counted)[None].long())
    (found,) = _losses(logits, [counted], top_k)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    pairs = zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True)
    for ours, stock in pairs:  # zero for top-k of all experts
        assert torch.allclose(ours, stock, rtol=2e-6, atol=5e-8)


def test_auxiliary_gradient_in_bf16_is_as_exact_as_stocks() -> None:
    logits = _logits(torch.bfloat16)
    # Exact: the same choices of experts, in float64.
    wide = [layer.detach().double().requires_grad_() for layer in logits]
    chosen = [torch.softmax(layer, -1).topk(2).indices for layer in logits]
    share = torch.stack([torch.nn.functional.one_hot(ids, 8).sum((0, 1)) for ids in chosen]).sum(0).double() / 60
    exact = torch.autograd.grad((share * torch.cat(wide).softmax(-1).mean(0)).sum() * 8, wide)
    ours = torch.autograd.grad(_losses(logits, [20])[0], logits)
    stock = torch.autograd.grad(load_balancing_loss_func(tuple(logits), 8, 2), logits)
    for mine, theirs, truth in zip(ours, stock, exact, strict=True):
        assert distance(mine, truth) <= 1.1 * distance(theirs, truth)


def test_auxiliary_loss_of_many_layers_is_stacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _logits(torch.float32, layers=7)
    whole = _losses(logits, [20])
    monkeypatch.setattr("fastpack_trl.step.load_balancing._CHUNK", 2 * logits[0].numel())
    torch.testing.assert_close(_losses(logits, [20]), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("parts", [[7, 13], [5, 1, 8], [6]])
def test_tokens_in_no_part_do_not_count(parts: list[int]) -> None:
    logits, counted = _logits(torch.float32), sum(parts)
    cut = [layer.detach()[:counted].requires_grad_() for layer in logits]
    found, expected = _losses(logits, parts), _losses(cut, parts)
    assert torch.equal(found, expected)
    weights = torch.arange(1.0, len(parts) + 1)
    ours = torch.autograd.grad((found * weights).sum(), logits)
    theirs = torch.autograd.grad((expected * weights).sum(), cut)
    for mine, grad in zip(ours, theirs, strict=True):
        assert torch.equal(mine[:counted], grad)
        assert not mine[counted:].any()


def test_somebody_elses_balancing_loss_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    def own(gate_logits: Any, *args: Any) -> Tensor:
        loss: Tensor = 3.0 + 0.0 * gate_logits[0].sum()
        return loss

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", own)
    ours = train(FastSFTTrainer, tmp_path, family="qwen3_moe", **ONE_STEP)
    assert ours.state.log_history[0]["aux_loss"] == 3.0
    assert f"load_balancing_loss_func was replaced by {__name__}" in ours.fastpack_report["sync_free"].reason
