"""Where TRL's own rows or attention compute something else than the model, the report says that their loss differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_material import assert_same_log, both, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.testing import tiny_model


def qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = tiny_model("qwen3").config.to_dict() | {"eos_token_id": 2}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: text[name] for name in (*names, "num_key_value_heads", "rope_parameters", "eos_token_id")}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=kept, vision_config=vision)).float()


def capped_sdpa() -> Any:
    try:
        model = tiny_model("gemma2", attn_implementation="sdpa")
    except ValueError:
        pytest.skip("this transformers refuses sdpa for Gemma 2")
    with torch.no_grad():  # scores that the softcap bends
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 40
    return model


def report_of(folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    trained = train(FastSFTTrainer, folder, **{"fast": {}, "max_steps": 1, "eval_strategy": "no"} | options)
    return trained.fastpack_report.to_dict()["facts"], " ".join(trained.fastpack_report.banner().split())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gpt_oss"])
def test_documents_that_leak_in_packed_rows_of_stock_are_in_the_banner(family: str, tmp_path: Path) -> None:
    model = qwen_vl if family == "qwen2_5_vl" else lambda: tiny_model(family)
    said, banner = report_of(tmp_path, model=model(), packing=True)
    assert "6 of 12 pairs" in said["stock loss"]
    assert f"stock loss: {said['stock loss']}" in banner
    assert verify_packing(model()).proven
    assert "stock loss" not in report_of(tmp_path, model=model())[0]  # stock pads: nothing to leak
    unproven, _ = report_of(tmp_path, model=model(), packing=True, fast={"verify_packing": "off"})
    assert "stock loss" not in unproven


def test_a_model_that_stock_keeps_apart_has_no_such_line(tmp_path: Path) -> None:
    assert "stock loss" not in report_of(tmp_path, packing=True)[0]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_softcap_that_stock_leaves_out_is_in_the_banner(packing: bool, tmp_path: Path) -> None:
    said, _ = report_of(tmp_path, model=capped_sdpa(), packing=packing)
    assert "leaves out the softcap" in said["stock loss"]


def test_a_softcap_that_stock_leaves_out_is_compared_with_eager(tmp_path: Path) -> None:
    model = capped_sdpa()
    assert verify_packing(model).proven
    eager = tiny_model("gemma2", attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    ours, _ = both(tmp_path / "sdpa", model=model, packing=True, optim="sgd")
    _, stock = both(tmp_path / "eager", model=eager, packing=True, optim="sgd")
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert_same_log(ours, stock, rtol=1e-4)
