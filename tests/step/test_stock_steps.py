"""Steps that fall back to stock's loss in the middle of a run: computed as stock does, and named in the report once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_material import assert_same_log, both, build, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

OUTPUTS = "loss and metrics as stock where compute_loss is called with return_outputs=True"
PADDED = "evaluation of padded batches, or with predictions, runs as stock"


def asks_for_outputs(cls: type[SFTTrainer]) -> Any:
    class Outputs(cls):  # type: ignore[valid-type,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keywords)
            return (loss, outputs) if return_outputs else loss

    return Outputs


def edits(cls: type[SFTTrainer], edit: Any) -> Any:
    class Edits(cls):  # type: ignore[valid-type,misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            edit(inputs)
            return super().compute_loss(model, inputs, *args, **keywords)

    return Edits


def said(messages: list[str], text: str) -> int:
    return sum(text in message for message in messages)


def test_a_loss_with_outputs_is_stocks_and_in_the_report_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, stock = (
        train(asks_for_outputs(cls), tmp_path / cls.__name__, packing=True) for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock)
    line = ours.fastpack_report["sync_free"]
    assert line.reason.count(OUTPUTS) == 1
    assert said(caplog.messages, OUTPUTS) == 1


def masked(inputs: Any) -> None:
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])


def test_rows_that_got_an_attention_mask_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"packing": False, "padding_free": True, "max_length": None}
    ours, stock = (
        train(edits(cls, masked), tmp_path / cls.__name__, eval_strategy="no", per_device_train_batch_size=1, **options)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock)
    text = "loss and metrics as stock for rows with an attention mask, or without position_ids"
    assert text in ours.fastpack_report["sync_free"].reason
    assert said(caplog.messages, text) == 1


def test_what_still_asks_the_device_and_evaluation_with_predictions_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {"compute_metrics": lambda prediction: {"rows": len(prediction.predictions)}}
    ours, stock = both(tmp_path, packing=True, include_num_input_tokens_seen="all", trainer=metrics)
    assert_same_log(ours, stock)
    reason = ours.fastpack_report["sync_free"].reason
    assert reason.count("evaluation with compute_metrics runs as stock") == 1
    assert "include_num_input_tokens_seen asks the device" in reason
    assert PADDED not in reason
    trainer = build(FastSFTTrainer, tmp_path, eval_strategy="no")
    with caplog.at_level(logging.WARNING):
        trainer.predict(trainer.train_dataset)
    assert PADDED in trainer.fastpack_report["sync_free"].reason
    assert said(caplog.messages, PADDED) == 1
    trainer.train()
    assert PADDED not in trainer.fastpack_report["sync_free"].reason
