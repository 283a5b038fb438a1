"""The packing check sees branches behind tensors that are zero before training, and leaves those as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from odd_models import Mean, Sums, model_with
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, verify_packing
from fastpack_trl.attention import start_proof
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.model.changes import zeros_perturbed
from fastpack_trl.testing import tiny_model

TARGETS = ["q_proj", "v_proj", "down_proj"]
STEEP = {"learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 1e9, "eval_strategy": "no"}


def adapted(config: type[peft.PeftConfig], **options: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(tiny_model("qwen3"), config(task_type="CAUSAL_LM", target_modules=TARGETS, **options))


def lily() -> Any:
    return adapted(peft.LilyConfig, r=4)


MIXING = {"lily": lily, "mean": lambda: model_with(Mean), "sums": lambda: model_with(Sums)}


@pytest.mark.parametrize("kind", MIXING)
def test_branch_behind_a_zero_gate_leaks_before_it_is_trained(kind: str) -> None:
    model = MIXING[kind]()
    assert len(verify_packing(model).leaks) >= 6
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert verify_packing(model).proven, "a frozen gate stays closed"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (peft.LoraConfig, {}),
        (peft.LoraConfig, {"use_dora": True}),
        (peft.LoraConfig, {"bias": "all"}),
        (peft.VeraConfig, {"r": 4}),
        (peft.OFTConfig, {}),
    ],
    ids=["lora", "dora", "bias", "vera", "oft"],
)
def test_adapters_that_start_at_zero_and_mix_no_tokens_pass(config: Any, options: dict[str, Any]) -> None:
    model = adapted(config, **options)
    assert any(not parameter.any() for parameter in model.parameters() if parameter.requires_grad)
    assert verify_packing(model).proven


def test_every_tensor_is_restored_bit_by_bit_also_after_an_exception() -> None:
    model = lily()
    zeros = [parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.any()]
    with torch.no_grad():
        zeros[0].neg_()  # -0.0 is zero too
        zeros[-1].set_(zeros[0].data)  # two parameters of one memory
    before = [(p, p.detach().clone(), p.detach().signbit(), p._version, p.grad) for p in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(KeyError), zeros_perturbed(model):
        assert all(parameter.all() for parameter in zeros)
        assert all(torch.equal(p, content) for p, content, *_ in before if content.any())
        raise KeyError
    assert not verify_packing(model).proven
    for parameter, content, signs, version, grad in before:
        assert torch.equal(parameter, content)
        assert torch.equal(parameter.signbit(), signs)
        assert parameter._version == version
        assert grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cast_made_during_the_check_serves_no_later_call() -> None:
    model = adapted(peft.LoraConfig, lora_alpha=32).bfloat16()
    apply_lora(model)
    ids = torch.arange(5, 15)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
        before = model.base_model.model.model.layers[0].self_attn.q_proj.fastpack_cast
        assert verify_packing(model).proven
    assert before is not None
    assert model.base_model.model.model.layers[0].self_attn.q_proj.fastpack_cast is before


@pytest.mark.parametrize("kind", MIXING)
def test_rows_of_a_mixing_branch_stay_those_of_stock(kind: str, tmp_path: Path) -> None:
    options = {**STEEP, "gradient_accumulation_steps": 2, "max_steps": 3}
    ours, stock = (train(cls, tmp_path, model=MIXING[kind](), **options) for cls in (FastSFTTrainer, SFTTrainer))
    assert_same_log(ours, stock)
    line = ours.fastpack_report["batches"]
    assert (line.status, "failed its packing check: " in line.reason, "LEAK" in line.reason) == ("stock", True, True)


@pytest.mark.parametrize(("kind", "rows"), [("lily", "stock"), ("mean", "stock"), ("sums", "documents")])
def test_packed_rows_are_stocks_where_padding_does_not_separate_documents_either(
    kind: str, rows: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**STEEP, "packing": True, "gradient_accumulation_steps": 2, "max_steps": 3}
    ours = train(FastSFTTrainer, tmp_path, model=MIXING[kind](), **options)
    report = ours.fastpack_report
    assert report["batches"].path == rows
    assert ("stock loss" in report.facts) == (rows == "documents"), (
        "the loss of documents is right, that of stock leaks"
    )
    if rows == "stock":
        assert "padded_documents failed its packing check" in report["batches"].reason
        assert_same_log(ours, train(SFTTrainer, tmp_path, model=MIXING[kind](), **options))
        ours.train()  # TRL's rows are not checked as if they could be right
        assert ours.fastpack_run.plan.kind == "stock"


def test_small_copy_has_the_adapters() -> None:
    """It stands for a model whose parameters are in other processes."""
    with start_proof.small_copy(lily(), torch.device("cpu"), None) as copy:
        assert verify_packing(copy).leaks
