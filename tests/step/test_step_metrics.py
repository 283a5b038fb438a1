"""Metrics that are read once per log have the values that stock reads in each micro-batch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_material import vision_model
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.step.metrics import DeferredMetrics, counted_ranks


@pytest.mark.parametrize(
    ("ranks", "last", "remainder", "expected"),
    [(1, True, 3, 1), (4, False, 3, 4), (4, True, 3, 3), (4, True, 7, 4), (4, True, 0, 4), (4, True, -1, 4)],
)
def test_ranks_are_left_out_as_gather_for_metrics_does(ranks: int, last: bool, remainder: int, expected: int) -> None:
    state = SimpleNamespace(end_of_dataloader=last, remainder=remainder)
    assert counted_ranks(SimpleNamespace(gradient_state=state, num_processes=ranks)) == expected


def test_tokens_of_positions_with_several_sections_are_counted(tmp_path: Path) -> None:
    class Sections(FastSFTTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
            return inputs

    logs = []
    for cls in (FastSFTTrainer, Sections):
        model = vision_model("qwen3_vl")
        trainer = train(cls, tmp_path, model=model, fast={}, packing=True, max_steps=2, eval_strategy="no")
        assert trainer.fastpack_report["batches"].path == "packed"
        logs.append([(entry["num_tokens"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    assert logs[1] == [(tokens, pytest.approx(loss, rel=1e-5)) for tokens, loss in logs[0]]
    assert logs[0][0][0] > 4 * 4


def test_micro_batches_until_a_distant_log_are_few_tensors_and_may_be_taken_back() -> None:
    one = SimpleNamespace(num_processes=1, gradient_state=None, gather=lambda table: table)
    logs: dict[str, list[float]] = defaultdict(list)
    trainer: Any = SimpleNamespace(
        accelerator=one, aux_loss_enabled=False, _metrics={"train": logs}, _total_train_tokens=0, _tp_size=1
    )
    metrics, most = DeferredMetrics(), 0
    for step in range(600):
        point = metrics.rollback_point()
        for attempt in range(2 if step % 100 == 0 else 1):
            if attempt:
                metrics.rollback(point)
            for _ in range(2):
                metrics.keep(trainer, "train", torch.tensor([[2.0 * step + attempt, 1.0, 0.0]]), [2], [3])
        most = max(most, metrics.rollback_point()[1])
    metrics.flush(trainer)
    assert most < 300
    assert logs["entropy"] == [step + 0.5 * (step % 100 == 0) for step in range(600) for _ in range(2)]
    assert logs["num_tokens"] == [600 * 2 * 3]
