"""Checks before anything is loaded: incomplete checkpoints, damaged weights, the output folder, arguments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sft_material import TEXT_ROWS, Material, refused
from transformers import AutoModel
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.preflight import check_output_dir, choose_checkpoint, newest_checkpoint, unwritable

ROWS = Dataset.from_list([dict(row) for row in TEXT_ROWS])


def trainer(cls: type[SFTTrainer], model: Any, output: Path, steps: int = 4, rows: Any = ROWS) -> Any:
    more = {"bf16": False, "report_to": [], "max_length": 64, "per_device_train_batch_size": 1}
    args = SFTConfig(output_dir=str(output), max_steps=steps, save_steps=1, use_cpu=True, **more)
    return cls(model=str(model) if isinstance(model, Path) else model, args=args, train_dataset=rows)


@pytest.fixture
def output(material: Material) -> Path:
    """A run of TRL with three checkpoints, and a folder whose name sorts after theirs."""
    trainer(SFTTrainer, material.model, material.out, 3).train()
    (material.out / "checkpoint-3-copy").mkdir()
    return material.out


def cut(file: Path, keep: float = 0.5) -> None:
    file.write_bytes((content := file.read_bytes())[: int(len(content) * keep)])


def test_an_incomplete_checkpoint_is_refused_and_true_takes_the_newest_complete_one(
    output: Path, material: Material, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, complete = output / "checkpoint-3", output / "checkpoint-2"
    assert (choose_checkpoint(True, str(output)), newest_checkpoint(str(output))) == ((True, ""), newest)
    shutil.copytree(newest, pickled := material.folder / "pickled")
    # A complete one without safetensors and without an optimizer is trained on from.
    torch.save(load_file(newest / "model.safetensors"), pickled / "pytorch_model.bin")
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (pickled / name).unlink()
    for folder in (newest, pickled):
        resumed = trainer(FastSFTTrainer, material.model, material.folder / "resumed")
        resumed.train(resume_from_checkpoint=str(folder))
        assert resumed.state.global_step == 4
    cut(newest / "model.safetensors", 0.999)
    for requested in (newest, output):  # the folder of the run is no checkpoint
        line = refused(material, capsys, "--config", material.yaml(max_steps=3), "--resume_from_checkpoint", requested)
        assert f"{str(requested)!r} is not a complete checkpoint" in line
    (newest / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-3' is not .*trainer_state\.json is missing.* name another one"):
        trainer(FastSFTTrainer, material.model, output).train(resume_from_checkpoint=str(newest))
    assert newest_checkpoint(str(output)) == complete
    resumed = trainer(FastSFTTrainer, material.model, output, 3)
    resumed.train(resume_from_checkpoint=True)
    assert f"taking {complete}, the newest one" in caplog.text
    stock = trainer(SFTTrainer, material.model, material.folder / "stock", 3)
    stock.train(resume_from_checkpoint=str(complete))
    torch.testing.assert_close(resumed.model.state_dict(), stock.model.state_dict(), rtol=1e-4, atol=1e-6)
    for state in output.glob("*/trainer_state.json"):
        cut(state, 0)
    with pytest.raises(ValueError, match="train from the start"):
        choose_checkpoint(True, str(output))


def test_what_the_trainer_cannot_use_is_refused_before_the_data_are_read(tmp_path: Path, material: Material) -> None:
    model = shutil.copytree(material.model, tmp_path / "model")
    cut(model / "model.safetensors")
    for message, given, rows in (
        (r"cannot be loaded: model\.safetensors is damaged", model, ROWS),
        ("Qwen3Model cannot generate", AutoModel.from_pretrained(material.model), ROWS),
        ("train_dataset is empty", material.model, ROWS.select([])),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(FastSFTTrainer, given, tmp_path / "out", rows=rows)
    assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        FastSFTTrainer(model="model", nonsense=1)  # type: ignore[call-arg]


def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name, place in {"/proc/absent/out": "/proc", "/proc/out": "/proc", "file/out": "file", "link": "link"}.items():
        with pytest.raises(ValueError, match=rf"output_dir '.*': nothing can be written in '.*{place}' .*: name anoth"):
            check_output_dir(SFTConfig(output_dir=str(tmp_path / name), bf16=False, use_cpu=True))
    assert (unwritable(tmp_path / "new" / "folder"), list(tmp_path.glob("new*"))) == ("", [])
    check_output_dir(SFTConfig(output_dir="/proc", save_strategy="no", bf16=False, use_cpu=True))
