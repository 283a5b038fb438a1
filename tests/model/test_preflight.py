"""Checks before anything is loaded: incomplete checkpoints, damaged weights, the output folder, counts, arguments."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sft_material import TEXT_ROWS, Material, refused
from transformers import AutoModel, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.cli.main import main
from fastpack_trl.model.preflight import check_output_dir, unwritable
from fastpack_trl.model.saved_files import choose_checkpoint, newest_checkpoint, weights_fault

ROWS = Dataset.from_list([dict(row) for row in TEXT_ROWS])


def trainer(cls: type[SFTTrainer], model: Path, output: Path, steps: int = 4, rows: Any = ROWS, **settings: Any) -> Any:
    args = SFTConfig(
        output_dir=str(output), max_steps=steps, save_steps=1, use_cpu=True, bf16=False, report_to=[], max_length=64,
        per_device_train_batch_size=1, **settings,
    )  # fmt: skip
    return cls(model=str(model) if isinstance(model, Path) else model, args=args, train_dataset=rows)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, sft_folder: Path) -> Path:
    """A run of TRL with three checkpoints, and a folder whose name sorts after theirs."""
    output = tmp_path_factory.mktemp("saved") / "out"
    trainer(SFTTrainer, sft_folder / "model", output, 3).train()
    (output / "checkpoint-3-copy").mkdir()
    return output


@pytest.fixture
def output(saved: Path, material: Material) -> Path:
    shutil.copytree(saved, material.out)
    return material.out


def cut(name: str, keep: float = 0.5) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(
        (content := (folder / name).read_bytes())[: int(len(content) * keep)]
    )


def gone(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    gone("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")(folder)


def as_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


FAULTS = {
    "trainer_state.json is missing": gone("trainer_state.json"),
    "trainer_state.json is cut short": cut("trainer_state.json"),
    "model.safetensors is cut short": cut("model.safetensors", 0.999),
    "model.safetensors is a pointer of git-lfs": as_pointer,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_checkpoint_is_refused_and_a_complete_one_named(
    output: Path, material: Material, fault: str
) -> None:
    newest = output / "checkpoint-3"
    FAULTS[fault](newest)
    with pytest.raises(ValueError, match="is not a complete checkpoint") as caught:
        trainer(FastSFTTrainer, material.model, output).train(resume_from_checkpoint=str(newest))
    assert all(part in str(caught.value) for part in (str(newest), fault, str(output / "checkpoint-2")))
    assert newest_checkpoint(str(output)) == output / "checkpoint-2"


@pytest.mark.parametrize("change", [lambda folder: None, as_pickle], ids=["all", "a pickle without optimizer"])
def test_training_resumes_from_a_complete_checkpoint(output: Path, material: Material, change: Any) -> None:
    change(output / "checkpoint-3")
    resumed = trainer(FastSFTTrainer, material.model, output)
    resumed.train(resume_from_checkpoint=str(output / "checkpoint-3"))
    assert resumed.state.global_step == 4


def test_true_takes_the_newest_complete_checkpoint_and_says_so(
    output: Path, material: Material, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_checkpoint(True, str(output)) == (True, "")
    gone("trainer_state.json")(output / "checkpoint-3")
    resumed = trainer(FastSFTTrainer, material.model, output, 3)
    resumed.train(resume_from_checkpoint=True)
    (said,) = [record.getMessage() for record in caplog.records if "resume: checkpoint-3" in record.getMessage()]
    assert all(part in said for part in ("trainer_state.json is missing", f"taking {output / 'checkpoint-2'}"))
    stock = trainer(SFTTrainer, material.model, material.folder / "stock", 3)
    stock.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    for ours, theirs in zip(resumed.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    for checkpoint in (1, 2, 3):
        cut("trainer_state.json", 0)(output / f"checkpoint-{checkpoint}")
    with pytest.raises(ValueError, match="train from the start"):
        choose_checkpoint(True, str(output))


def test_from_the_command_line(
    output: Path, material: Material, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cut("model.safetensors")(output / "checkpoint-3")
    config = material.yaml(max_steps=3)
    for asked in (output / "checkpoint-3", output):  # the folder of the run is no checkpoint
        line = refused(material, capsys, "--config", config, "--resume_from_checkpoint", asked)
        assert f"name {str(output / 'checkpoint-2')!r}" in line
    assert main(["sft", "--config", str(config), "--resume_from_checkpoint", "true"]) == 0
    assert f"taking {output / 'checkpoint-2'}" in caplog.text


def test_damaged_shards_and_adapters_are_found(tmp_path: Path, material: Material) -> None:
    model = AutoModelForCausalLM.from_pretrained(material.model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1].name
    assert weights_fault(tmp_path) == ""
    cut(shard)(tmp_path)
    assert f"{shard} is cut short" in weights_fault(tmp_path)
    gone(shard)(tmp_path)
    assert f"{shard} is missing" in weights_fault(tmp_path)
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(tmp_path / "both" / "second")
    for folder in (tmp_path / "both", tmp_path / "both" / "second"):
        assert weights_fault(folder, needed=True) == ""
    cut("adapter_model.safetensors")(tmp_path / "both" / "second")
    for folder in (tmp_path / "both", tmp_path / "both" / "second"):
        assert "adapter_model.safetensors is cut short" in weights_fault(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "training_args.bin").touch()
    assert "no weights" in weights_fault(tmp_path / "empty", needed=True)
    (tmp_path / "empty" / "adapters.safetensors").touch()
    assert weights_fault(tmp_path / "empty", needed=True) == "", "config.json may name it"


def test_what_the_trainer_cannot_use_is_refused_before_the_data_are_read(tmp_path: Path, material: Material) -> None:
    model = shutil.copytree(material.model, tmp_path / "model")
    cut("model.safetensors")(model)
    refusals: list[tuple[str, Any, dict[str, Any]]] = [
        (r"cannot be loaded: model\.safetensors is cut short", model, {}),
        ("Qwen3Model cannot generate", AutoModel.from_pretrained(material.model), {}),
        ("train_dataset is empty", material.model, {"rows": ROWS.select([])}),
    ]
    for message, given, more in refusals:
        with pytest.raises(ValueError, match=message):
            trainer(FastSFTTrainer, given, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        FastSFTTrainer(model="model", nonsense=1)  # type: ignore[call-arg]


def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name, why in {"/proc/absent/out": "nothing can be written in '/proc'", "file/out": r"'.*file' is a file",
                      "link": r"nothing can be written in '.*link'"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"output_dir '.*': {why}"):
            check_output_dir(SFTConfig(output_dir=str(tmp_path / name), bf16=False, use_cpu=True))
    assert unwritable(tmp_path / "new" / "folder") == ""
    assert list(tmp_path.glob("new*")) == []
    check_output_dir(SFTConfig(output_dir="/proc", save_strategy="no", bf16=False, use_cpu=True))
    with pytest.raises(ValueError, match="nothing can be written"):
        check_output_dir(SFTConfig(output_dir="/proc/out", save_strategy="no", bf16=False, use_cpu=True))
