"""The learner of GRPO and RLOO: micro-batches of a step run forward together, with stock's losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_changed_alike, assert_same, both, build
from trainer_material import EndsEpoch, assert_line, callback, halve

from fastpack_trl.testing import count_host_syncs
from fastpack_trl.trainers import online

STEP = {"gradient_accumulation_steps": 4, "max_steps": 3, "eval_steps": 3}
HOST = ("fastpack_trl/packing/",)
"""Where rows are found: in tensors of the host."""
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 8, "entropy_coef": 0.01}, {"lora": False}], ids=str)
def test_merged_micro_batches_log_what_stock_logs(options: dict[str, Any], tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, **STEP | options)
    assert ours.fastpack_report["merge_accumulation"].status == "on", ours.fastpack_report
    assert ours.fastpack_report["share_prefixes"].status == "on"
    assert_same(ours, stock, **CLOSE)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_step_is_one_forward_and_one_backward_and_its_gradients_are_stocks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**STEP, "max_steps": 2, "eval_strategy": "no", "optim": "sgd", "learning_rate": 0.03, "max_grad_norm": 0}
    rows: dict[bool, list[int]] = {True: [], False: []}

    def counting(trainer: Any) -> Any:
        def count(module: Any, args: Any, output: Any) -> None:
            of_ours = rows[hasattr(trainer, "fastpack_run")]
            of_ours.append(len(output.last_hidden_state)) if torch.is_grad_enabled() else None

        return trainer.model.get_base_model().model.register_forward_hook(count)

    monkeypatch.setattr("fastpack_trl.packing.batching.hook_inside", lambda _: "")  # that of the test knows rows
    ours, stock = both(name, tmp_path, around=counting, **options)
    assert rows[True] == [1, 1]
    assert_changed_alike(ours, stock)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "is not a multiple"),
        ({"family": "qwen3_moe", "router_aux_loss_coef": 0.1}, "auxiliary loss"),
    ],
)
def test_what_is_not_merged_is_said_and_stocks(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, **STEP | options)
    assert_line(ours, "merge_accumulation", why, status="off")
    assert_same(ours, stock, **CLOSE)


def clamp(state: Any, model: Any) -> None:
    if state.global_step == 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize(("event", "act"), [("on_substep_end", halve), ("on_step_begin", clamp)])
def test_what_sees_gradients_of_each_micro_batch_sees_stocks(event: str, act: Any, tmp_path: Path) -> None:
    options = STEP | {"optim": "sgd", "learning_rate": 0.03, "max_grad_norm": 0, "eval_strategy": "no"}
    ours, stock = both("GRPO", tmp_path, lambda: {"trainer": {"callbacks": [callback(event, act)()]}}, **options)
    said = "on_substep_end of Calls" if act is halve else "a hook on the gradient of"
    assert_line(ours, "merge_accumulation", said, status="off")
    assert_same(ours, stock, **CLOSE)


def test_micro_batches_that_lack_room_together_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 2.3 MB of the 70 % that may be taken; gradients and the optimizer's state will have 0.3 MB of it."""
    monkeypatch.setattr("fastpack_trl.features.merge_accumulation.free_bytes", lambda device: 3_400_000)
    ours, stock = both("GRPO", tmp_path, lora=False, **STEP | {"max_steps": 1, "eval_strategy": "no"})
    said = "GiB for the micro-batches of a step, 0.0 GiB may be taken"
    assert_line(ours, "merge_accumulation", said, status="off", path="stock")
    assert_same(ours, stock, **CLOSE)


def test_left_padding_with_learned_positions_is_stocks(tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, family="opt", **STEP)
    assert "learned positions" in ours.fastpack_report["batches"].reason
    assert_same(ours, stock, **CLOSE)


def test_a_learner_call_reads_tokens_and_masks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, groups = [], online._OnlineTrainer._fastpack_groups

    def found(self: Any, *args: Any) -> Any:
        with count_host_syncs(device="cpu", host=HOST) as syncs:
            made = groups(self, *args)
        reads.append(len(syncs.of("sync", "copy")))
        return made

    monkeypatch.setattr(online._OnlineTrainer, "_fastpack_groups", found)
    build("GRPO", tmp_path, fast=True, **STEP | {"num_iterations": 2, "eval_strategy": "no"}).train()
    assert reads == [1] * 5, "three steps, and the log-probabilities from before them of two generations"


def test_an_epoch_that_ends_as_a_step_begins_keeps_the_micro_batch_that_ran(tmp_path: Path) -> None:
    options = STEP | {"eval_strategy": "no", "max_steps": -1, "num_train_epochs": 2}
    ours, stock = both("GRPO", tmp_path, lambda: {"trainer": {"callbacks": [EndsEpoch()]}}, **options)
    assert_line(ours, "merge_accumulation", "not the next of TRL's buffer", status="off")  # of the second epoch
    assert_same(ours, stock, **CLOSE)
