"""Whole steps over a base in FP8: the side trains by the reference on the CPU; its table and decision."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import fp8_steps
from benchmarks.training_rows import Row
from benchmarks.training_side import OURS, OURS_FP8, SIDES, train_side
from fastpack_trl.lora import frozen_base


def record_of(loaded: Any, fp8: Any) -> dict[str, Any]:
    rows = [{"row": "a row", "side": side, "round": 0, **found} for side, found in ((OURS, loaded), (OURS_FP8, fp8))]
    return {"case": "fp8_steps", "rows": rows, "machine": {"device": "cuda", "gpu": "X"}, "versions": {"torch": "2"}}


def run(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "step_seconds": [seconds] * 4, "timed_tokens": 400, "losses": {"6": 2.0}, "peak_gib": 1.0,
        "profile": {"busy_seconds": seconds},
        "report": {"features": {"activation_memory": {"path": "keep"}, "frozen_base": {"reason": "why"}}}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "answer"), [(0.8, "yes (1.25)"), (0.9, "no (1.11)")])
def test_the_decision_is_of_the_rates(seconds: float, answer: str) -> None:
    text = fp8_steps.table(record_of(run(1.0), run(seconds)))
    assert f"a row: at least 1.2x: {answer}" in text
    assert "| FP8 |" in text
    assert "| keep | why |" in text


def test_a_side_that_failed_is_named_and_nothing_decided() -> None:
    text = fp8_steps.table(record_of(run(1.0), {"failed": "first\nOutOfMemoryError: all gone"}))
    assert "OutOfMemoryError: all gone" in text
    assert "at least" not in text


def test_the_side_trains_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")
    watched = {"warmup": 2, "longest_warmup": 4, "timed": 4}
    trainer, watch = train_side(Row("tiny-qwen3", 256, "lora"), SIDES[OURS_FP8], 0, watched, logging_steps=2)
    found = watch.figures(trainer)
    assert "LoRA bases multiply in FP8" in found["report"]["features"]["frozen_base"]["reason"]
    assert len(found["step_seconds"]) == 4
