"""The learner of GRPO and RLOO: micro-batches of a step run forward together, with stock's losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_same, both, build, trained

STEP = {"gradient_accumulation_steps": 4, "max_steps": 3, "eval_steps": 3}
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_iterations": 2}, id="iterations"),
        pytest.param({"steps_per_generation": 8}, id="generations of two steps"),
        pytest.param({"beta": 0.1}, id="reference"),
        pytest.param({"loss_type": "grpo"}, id="loss per sequence"),
        pytest.param({"temperature": 0.7}, id="temperature"),
        pytest.param({"mask_truncated_completions": True}, id="truncated"),
        pytest.param({"importance_sampling_level": "sequence"}, id="sequence ratios"),
        pytest.param({"entropy_coef": 0.01}, id="entropy"),
        pytest.param({"lora": False}, id="full"),
        pytest.param({"cast_lm_head_to_fp32": True, "lora": False}, id="fp32 head"),
    ],
)
def test_merged_micro_batches_log_what_stock_logs(options: dict[str, Any], tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, **STEP | options)
    assert ours.fastpack_report["merge_accumulation"].status == "on", ours.fastpack_report
    assert ours.fastpack_report["share_prefixes"].status == "on"
    assert_same(ours, stock, **CLOSE)


def test_rloo_merges_too(tmp_path: Path) -> None:
    ours, stock = both("RLOO", tmp_path, **STEP)
    assert ours.fastpack_report["merge_accumulation"].status == "on", ours.fastpack_report
    assert_same(ours, stock, **CLOSE)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_step_is_one_forward_and_one_backward_and_its_gradients_are_stocks(name: str, tmp_path: Path) -> None:
    options = {**STEP, "max_steps": 2, "eval_strategy": "no", "optim": "sgd", "learning_rate": 0.03, "max_grad_norm": 0}
    before = trained(build(name, tmp_path / "before", fast=False, **options).model)
    rows: list[tuple[int, ...]] = []

    def count(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        rows.append(tuple(output.last_hidden_state.shape[:2])) if torch.is_grad_enabled() else None

    ours = build(name, tmp_path / "ours", fast=True, **options)
    ours.model.get_base_model().model.register_forward_hook(count, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:  # the hook is of the test, and knows rows
        patch.setattr("fastpack_trl.packing.batching.hook_inside", lambda _: "")
        ours.train()
    assert [shape[0] for shape in rows] == [1, 1]
    stock = build(name, tmp_path / "stock", fast=False, **options)
    stock.train()
    mine, theirs = trained(ours.model), trained(stock.model)
    changed = torch.cat([(theirs[key] - before[key]).flatten() for key in before])
    apart = torch.cat([(mine[key] - theirs[key]).flatten() for key in before])
    assert apart.norm() <= 1e-4 * changed.norm()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "is no multiple"),
        ({"family": "qwen3_moe", "router_aux_loss_coef": 0.1}, "auxiliary loss"),
    ],
)
def test_what_is_not_merged_is_said_and_stocks(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, **STEP | options)
    line = ours.fastpack_report["merge_accumulation"]
    assert line.status == "off"
    assert why in line.reason
    assert_same(ours, stock, **CLOSE)


def test_left_padding_with_learned_positions_is_stocks(tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, family="opt", **STEP)
    assert "learned positions" in ours.fastpack_report["batches"].reason
    assert_same(ours, stock, **CLOSE)
