"""Five steps and an evaluation of each trainer log what stock's log, and change the weights as stock's do."""

from __future__ import annotations

from pathlib import Path

import pytest
from preference_material import NAMES, assert_changed_alike, assert_same, both

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
