"""The report of a run where people look later: beside checkpoints and in the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer_material import train

import fastpack_trl
from fastpack_trl import FastSFTTrainer
from fastpack_trl._version import REPOSITORY


def run(folder: Path, **fast: Any) -> FastSFTTrainer:
    ours = train(
        FastSFTTrainer, folder, packing=True, max_steps=4, logging_steps=1, save_strategy="steps", save_steps=3,
        eval_strategy="no", fast=fast,
    )  # fmt: skip
    assert isinstance(ours, FastSFTTrainer)
    return ours


def test_the_report_is_saved_and_shown_in_the_model_card(tmp_path: Path) -> None:
    ours = run(tmp_path)
    found = json.loads((tmp_path / "fastpack_report.json").read_text(encoding="utf-8"))
    assert (found["fastpack_trl"], found["step"]) == (fastpack_trl.__version__, 4)
    assert found["features"] == ours.fastpack_report.to_dict()["features"]
    assert found["proof"]["proven"]
    assert found["tokens_per_second"] > 0
    assert (tmp_path / "checkpoint-3").is_dir()

    ours.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count("### fastpack-trl") == 1
    assert f"{fastpack_trl.__version__}: `packed_attention` (" in card
    assert ("/OWNER/" in REPOSITORY) != (REPOSITORY in card), "no link to an address that does not exist"
    assert "tokens/s, between logs" in card
    assert "- Packing: proven: no document sees another" in card
    assert card.index("### fastpack-trl") < card.index("## Citations")


def test_off_writes_and_tells_nothing(tmp_path: Path) -> None:
    ours = run(tmp_path, save_report=False)
    ours.create_model_card()
    assert not (tmp_path / "fastpack_report.json").exists()
    assert "### fastpack-trl" not in (tmp_path / "README.md").read_text(encoding="utf-8")
