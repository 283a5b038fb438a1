"""The whole stack as a CUDA device has it, on the CPU: between two logs nothing asks the device, whatever is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captured_material import build, train
from out_of_memory import too_large
from step_material import BetweenLogs

from fastpack_trl import FastSFTTrainer, ThroughputCallback
from fastpack_trl.features.sync_free import why_stock_loss
from fastpack_trl.testing import count_host_syncs

TWIN = ("fastpack_trl/attention/row_operator.py",)
"""On the CPU the attention operator runs its twin, which reads lengths that the kernel reads on the device."""


@pytest.mark.parametrize(("lora", "accumulation"), [(False, 3), (True, 1)])
def test_nothing_waits_between_two_logs(tmp_path: Path, devices: Any, lora: bool, accumulation: int) -> None:
    """Plan, a step out of memory, merged rows, recordings, replays, callbacks, an evaluation in the middle."""
    counter = BetweenLogs(device="cpu", host=TWIN)
    trainer = build(
        FastSFTTrainer, tmp_path, devices, family="qwen3", lora=lora, callbacks=[counter, ThroughputCallback()],
        fast={"cuda_graph": "auto", "activation_memory_gib": 0.5, "merge_accumulation": "on"},
        max_steps=60, logging_steps=20, eval_strategy="steps", eval_steps=30, gradient_checkpointing=True,
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=1,
    )  # fmt: skip
    with too_large(trainer, "forward", 1) as failed:
        trainer.train()
    report, log = trainer.fastpack_report, devices.made[0].log
    assert failed == ["forward"]
    fell = "merge_accumulation" if accumulation > 1 else "activation_memory"
    assert "out of memory" in report[fell].reason, report[fell]
    assert report["cuda_graph"].status == "on", report["cuda_graph"]
    assert "the device was idle for 50% of 3 eager steps" in report["cuda_graph"].reason
    assert log.count("replay") >= 10
    assert counter.steps >= 55
    assert counter.per_micro_batch == 0, counter.syncs


def test_reasons_are_found_without_asking_the_device(tmp_path: Path, devices: Any) -> None:
    """A reason that formats a tensor reads it: each text is made only where its condition holds."""
    trainer = train(tmp_path, devices, max_steps=1)
    with count_host_syncs(device="cpu") as syncs:
        assert why_stock_loss(trainer.fastpack_run) == ""
    assert syncs.total == 0, syncs
