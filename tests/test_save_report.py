"""The report of a run where people look later: beside checkpoints, in the model card, in the config of trackers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from trainer_material import train
from transformers import TrainerCallback

import fastpack_trl
from fastpack_trl import FastSFTTrainer
from fastpack_trl._version import REPOSITORY


class Tracker(TrainerCallback):
    """Reads the arguments when training begins, as the callbacks of W&B, trackio and TensorBoard do."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.config = args.to_dict()
        self.text = args.to_json_string()  # TensorBoard
        assert "fastpack/version" not in pickle.loads(pickle.dumps(args)).to_dict()


def run(folder: Path, **fast: Any) -> tuple[FastSFTTrainer, Tracker]:
    tracker = Tracker()
    ours = train(
        FastSFTTrainer, folder, packing=True, max_steps=4, logging_steps=1, save_strategy="steps", save_steps=3,
        eval_strategy="no", fast=fast, trainer={"callbacks": [tracker]},
    )  # fmt: skip
    assert isinstance(ours, FastSFTTrainer)
    return ours, tracker


def test_the_report_is_saved_and_shown_in_the_model_card_and_to_trackers(tmp_path: Path) -> None:
    ours, tracker = run(tmp_path)
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

    assert tracker.config["fastpack/version"] == fastpack_trl.__version__
    assert tracker.config["fastpack/packed_attention"].startswith("on: ")
    assert "fastpack/packed_attention" in json.loads(tracker.text)
    assert "fastpack/version" not in ours.args.to_dict(), "the arguments are as they were"
    pickle.dumps(ours.args)


def test_off_writes_and_tells_nothing(tmp_path: Path) -> None:
    ours, tracker = run(tmp_path, save_report=False)
    ours.create_model_card()
    assert not (tmp_path / "fastpack_report.json").exists()
    assert "### fastpack-trl" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not any(name.startswith("fastpack/") for name in tracker.config)


def test_tensorboard_gets_it_through_transformers_callback(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ours = train(FastSFTTrainer, tmp_path, packing=True, max_steps=1, eval_strategy="no", report_to="tensorboard")
    files = list(tmp_path.rglob("events.out.tfevents*"))
    assert any(b"fastpack/packed_attention" in file.read_bytes() for file in files)
    assert ours.state.global_step == 1
