"""Five steps and an evaluation of each trainer log what stock's log, and change the weights as stock's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import NAMES, assert_changed_alike, assert_same, both

from fastpack_trl.testing import tiny_model

FAMILIES = dict.fromkeys(NAMES, ("qwen3_moe", "gpt_oss")) | {"DPO": ("llama", "gemma3_text", "qwen3_moe", "gpt_oss")}
"""All of them once: what a family decides is the same for each trainer."""
CLOSE = {name: {"atol": 2e-5} for name in ("GRPO", "RLOO")}
"""Their loss is near zero: advantages of a group cancel, ratios are exponentials of differences of long sums."""
STEPS = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_five_steps_and_an_evaluation_log_what_stock_logs(name: str, lora: bool, tmp_path: Path) -> None:
    ours, stock = both(name, tmp_path, lora=lora)
    assert ours.fastpack_report["batches"].status == "on", ours.fastpack_report
    assert ours._fastpack_rows.ran >= 5
    assert_same(ours, stock, **CLOSE.get(name, {}))
    first = next(row["loss"] for row in ours.state.log_history if "loss" in row)
    if name == "DPO" and not lora:
        assert first == pytest.approx(0.6931472, abs=1e-5)


@pytest.mark.parametrize(("name", "family"), [(name, family) for name in NAMES for family in FAMILIES[name]])
def test_weights_change_as_under_stock(name: str, family: str, tmp_path: Path) -> None:
    """Under SGD at a rate that moves the loss: Adam's first steps show the sign of a gradient alone."""
    rate = 0.03 if name == "RLOO" else 0.3  # ratios of whole sequences: beyond, five steps are chaotic
    options = {"family": family, "learning_rate": rate, "eval_strategy": "no", **STEPS}
    ours, stock = both(name, tmp_path, **options)
    assert ours.fastpack_report["batches"].status == "on", ours.fastpack_report
    assert_same(ours, stock, **CLOSE.get(name, {}))
    assert_changed_alike(ours, stock)


@pytest.mark.parametrize(("name", "options"), [("DPO", {}), ("GRPO", {"cast_lm_head_to_fp32": True, "bf16": True})])
def test_a_head_with_a_bias_and_one_in_fp32_score_as_stocks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its hidden states are equal to the bit: the layers add nothing."""

    def sharp() -> dict[str, Any]:
        model = tiny_model("qwen3", tie_word_embeddings=False)
        model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
        with torch.no_grad():
            model.lm_head.weight.mul_(4.0)
            model.lm_head.bias.add_(1.0)
            for layer in model.model.requires_grad_(False).layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        return {"model": model}

    ours, stock = both(name, tmp_path, sharp, lora=name == "DPO", max_steps=1, eval_strategy="no", **options)
    assert_same(ours, stock, rtol=2e-5)


def test_the_auxiliary_loss_is_stocks_where_it_does_not_know_the_name_of_the_experts(tmp_path: Path) -> None:
    models = [tiny_model("deepseek_v3") for _ in range(2)]
    if not hasattr(models[0].config, "output_router_logits"):
        pytest.skip("returns no router logits in this transformers")
    models[1].config.num_experts = models[1].config.n_routed_experts
    options = {"router_aux_loss_coef": 0.1, "max_steps": 1, "eval_strategy": "no"}
    ours, stock = both("DPO", tmp_path, lambda: {"model": models.pop(0)}, **options)
    assert ours.state.log_history[0]["aux_loss"] > 1
    assert_same(ours, stock)
