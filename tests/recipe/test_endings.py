"""A run that is ended from outside: a checkpoint that loads, and one line that says how to go on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sft_material import Material, refused
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.cli.main import main
from fastpack_trl.errors import UserError
from fastpack_trl.model.preflight import checkpoint_fault
from fastpack_trl.recipe import train
from fastpack_trl.recipe.endings import alone_in

ROOT = Path(__file__).parents[2]


class Signals(TrainerCallback):
    """Sends this process a signal in step 2: in the middle of a step, or while a checkpoint is written."""

    def __init__(self, saving: bool) -> None:
        self.saving = saving

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.saving:
            os.kill(os.getpid(), signal.SIGTERM)


def signalled(monkeypatch: pytest.MonkeyPatch, saving: bool) -> None:
    make = train.make_trainer
    monkeypatch.setattr(train, "make_trainer", lambda arguments, _: make(arguments, [Signals(saving)]))
    if not saving:
        return
    stock = FastSFTTrainer._save

    def save(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        if output_dir is not None and output_dir.endswith("checkpoint-2"):
            os.kill(os.getpid(), signal.SIGTERM)
        stock(self, output_dir, *args, **kwargs)

    monkeypatch.setattr(FastSFTTrainer, "_save", save)


@pytest.mark.parametrize("saving", [False, True], ids=["in a step", "while saving"])
def test_sigterm_leaves_a_checkpoint_that_loads(
    material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saving: bool
) -> None:
    signalled(monkeypatch, saving)
    before = signal.getsignal(signal.SIGTERM)
    path = material.yaml(max_steps=5, save_strategy="steps", save_steps=2 if saving else 100)
    assert main(["sft", "--config", str(path)]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    line = capsys.readouterr().err.splitlines()[-1]
    step = 3 if saving else 2
    assert f"fastpack-trl sft: terminated at step {step}; go on from checkpoint-{step}: fastpack-trl sft" in line
    assert not checkpoint_fault(material.out / f"checkpoint-{step}")
    monkeypatch.undo()
    assert main(shlex.split(line.rpartition("fastpack-trl ")[2])) == 0
    assert "Training completed." in capsys.readouterr().out


def test_sigterm_without_checkpoints_says_what_would_keep_more(
    material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled(monkeypatch, saving=False)
    assert main(["sft", "--config", str(material.yaml())]) == 143
    line = capsys.readouterr().err.splitlines()[-1]
    assert "terminated at step 2, before any checkpoint: nothing to resume; save_strategy=steps" in line
    assert not (material.out / "model.safetensors").exists()


@pytest.mark.parametrize("file", ["trainer_state.json", "model.safetensors"])
def test_a_full_disk_is_one_line(
    material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """``/dev/full`` answers every write as a full disk does."""
    stock = FastSFTTrainer._save

    def save(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        stock(self, output_dir, *args, **kwargs)
        if file != "trainer_state.json":
            with open("/dev/full", "wb") as full:  # noqa: PTH123 - as a library writes its file
                full.write(b"0" * 100_000)
        else:
            (Path(str(output_dir)) / file).symlink_to("/dev/full")

    monkeypatch.setattr(FastSFTTrainer, "_save", save)
    path = material.yaml(save_strategy="steps", save_steps=1)
    assert main(["sft", "--config", str(path)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"its disk is full \(.*No space left on device.*\): free some space", line), line
    assert "the run ended at step 1" in line


def test_two_runs_in_one_folder_are_refused_and_the_folder_is_free_again(
    material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    material.out.mkdir()
    path = material.yaml(max_steps=1)
    with alone_in(material.out):
        assert "another run is writing there: name another folder" in refused(material, capsys, "--config", path)
        with pytest.raises(UserError, match="another run is writing there"), alone_in(material.out):
            pass
    assert main(["sft", "--config", str(path)]) == 0
    assert not any(file.name.startswith(".") for file in material.out.iterdir()), "nothing is left behind"


@pytest.mark.slow
def test_a_home_that_cannot_be_written_names_the_variable(material: Material) -> None:
    variables = {"HOME": "/proc/none", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    ran = subprocess.run(
        [sys.executable, "-m", "fastpack_trl", "sft", "--config", str(material.yaml())],
        env=variables, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "name another folder with the environment variable HF_HOME" in ran.stderr.splitlines()[-1]


def test_a_run_of_one_process_logs_without_its_rank(
    material: Material, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        main(["sft", "--config", str(material.yaml(max_steps=1, packing=False, padding_free=True, max_length=None))])
        == 0
    )
    said = caplog.text + capsys.readouterr().err
    assert "You are using a per_device_train_batch_size of 1" in said
    assert "[RANK 0]" not in said
