"""Decisions of a run: made again where a setting was changed, not at all for what is off; a run that resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trainer_material import assert_line, build, figures, make_dataset, sentences, train
from trl import SFTConfig

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.features import FEATURES
from fastpack_trl.model.upstream import NEEDS

NAMES = [feature.name for feature in FEATURES if feature.falls_back]
SWITCHED = [name for name in NAMES if name in NEEDS and name != "frozen_base"]


def make(folder: Path, kind: Any = FastSFTConfig, family: str = "qwen3", **fast: Any) -> FastSFTTrainer:
    fields = None if kind is SFTConfig else fast
    return build(FastSFTTrainer, folder, family=family, fast=fields, packing=True, max_steps=2, eval_strategy="no")


@pytest.mark.parametrize("kind", [SFTConfig, FastSFTConfig])
def test_a_feature_that_was_switched_off_before_a_second_run_is_off(tmp_path: Path, kind: Any) -> None:
    trainer = make(tmp_path, kind)
    trainer.train()
    assert trainer.fastpack_report["sync_free"].status == "on"
    step = trainer.fastpack_run.sync_free
    trainer.args.sync_free = False
    trainer.train()
    assert_line(trainer, "sync_free", status="off", reason="switched off")
    assert not trainer.fastpack_run.loss_is_ours
    assert trainer.fastpack_run.sync_free is step
    trainer.args.sync_free = "auto"
    trainer.train()
    assert trainer.fastpack_report["sync_free"].status == "on"


def test_deepspeed_shards_in_stage_3_alone_and_what_it_has_not_cast_yet_is_autocast(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    for deepspeed, bf16 in ((False, False), (True, False), (True, True)):
        trainer.is_deepspeed_enabled, trainer.args.bf16 = deepspeed, bf16
        with trainer.fastpack_run.autocast():
            assert torch.is_autocast_enabled("cpu") == bf16
        assert not trainer.fastpack_run.is_sharded


def test_attention_is_chosen_again_if_its_setting_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path)
    paths = {"auto": "per_document", "off": "stock", "sdpa": "sdpa"}
    for setting in ("auto", "off", "sdpa", "auto"):
        trainer.args.packed_attention = setting
        trainer.train()
        assert_line(trainer, "packed_attention", status="off" if setting == "off" else "on", path=paths[setting])
        assert (trainer.fastpack_report["batches"].status == "stock") == (setting == "off")
    assert "packed_attention: off (switched off)" in caplog.text
    caplog.clear()
    trainer.train()
    assert "packed_attention" not in caplog.text, "chosen once for one setting"
    trainer.args.packed_attention = "varlen"
    for _ in range(2):
        with pytest.raises(ValueError, match="packed_attention='varlen' cannot be used here: varlen needs CUDA"):
            trainer.train()


def test_a_feature_that_is_off_misses_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*SWITCHED, "frozen_base"):  # the last is off as it stands, and has no line then
        monkeypatch.setitem(NEEDS, name, ("transformers.nowhere.Gone",))
    with caplog.at_level(logging.WARNING):
        ours = train(
            FastSFTTrainer, tmp_path, family="qwen3_moe", packing=True, fast=dict.fromkeys(SWITCHED, "off"),
            trainer={"peft_config": LoraConfig(r=4, target_modules=["q_proj"])},
        )  # fmt: skip
    states = {line.feature: line.status for line in ours.fastpack_report if line.feature in SWITCHED}
    assert states == dict.fromkeys(SWITCHED, "off")
    assert "nowhere" not in caplog.text
    assert "nowhere" not in str(ours.fastpack_report)


def _losses(folder: Path, data: Any, resume: str = "", **more: Any) -> list[float]:
    options = {"eval_strategy": "no", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = train(FastSFTTrainer, folder, data=data, resume=resume, **options | more)
    losses = [row["loss"] for row in figures(trainer) if "loss" in row]
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["data set", "shuffled stream"])
def test_a_resumed_run_has_the_losses_of_the_whole_run(kind: str, packing: bool, tmp_path: Path) -> None:
    data: Any = make_dataset("text")
    if kind != "data set":
        data = Dataset.from_dict({"text": sentences(200, 3)}).to_iterable_dataset(num_shards=2)
        data = data.shuffle(seed=1, buffer_size=30)
    whole = _losses(tmp_path, data, packing=packing)
    assert _losses(tmp_path, data, "checkpoint-2", packing=packing) == whole
