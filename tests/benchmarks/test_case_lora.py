"""The case ``lora``: a row in miniature, its compiled side without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import lora, steps
from benchmarks.cases import Run
from benchmarks.lora_models import MODELS
from fastpack_trl.bench.environment import quiet


def row(rounds: int = 2) -> dict[str, Any]:
    with quiet():
        task = lora.row_task(Run(rounds=rounds), MODELS["small"], 128, 1, True, backend="eager")
        return {**task.label, **task.measure(60.0)}


def test_every_side_trains_the_same_rows_and_is_timed() -> None:
    found = row()
    assert set(found["sides"]) == set(lora.SIDES)
    for side in found["sides"].values():
        assert len(side["seconds"]["values"]) == len(side["losses"]) == 2
        assert side["batch_tokens"] == found["sides"]["stock"]["batch_tokens"]
        assert (side["memory"], side["launches"]) == (None, None)  # there is no device here
    assert set(found["ratios"]) == set(lora.SIDES) - {"fastpack"}
    assert found["documents"]["longest"] <= 128
    assert found["setting"].startswith("small fp32 LoRA, 1 of")


def test_a_side_out_of_memory_is_a_row_and_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    original = steps._step

    def step_of(side: Any, device: str) -> Any:
        if side.trainer.__class__.__name__ == "SFTTrainer":
            trained = next(weight for weight in side.trainer.model.parameters() if weight.requires_grad)
            trained.grad = torch.full_like(trained, float("nan"))
            raise torch.OutOfMemoryError("out of memory")
        return original(side, device)

    monkeypatch.setattr(steps, "_step", step_of)
    found = row(rounds=1)
    for name in ("stock", "tuned"):
        assert "out of memory" in found["sides"][name]["failed"]
    assert all(loss == loss for loss in found["sides"]["fastpack"]["losses"])
    assert "fastpack_plan" in found["ratios"]
