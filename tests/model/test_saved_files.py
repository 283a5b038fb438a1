"""A checkpoint that was cut short is named before anything is loaded, with the newest complete one."""

from __future__ import annotations

import contextlib
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
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.cli.main import main
from fastpack_trl.model.preflight import check_output_dir
from fastpack_trl.model.saved_files import checkpoint_fault, choose_checkpoint, weights_fault

Harm = Callable[[Path], object]


def trainer(trainer_class: type[SFTTrainer], model: Path, output: Path, steps: int, **settings: Any) -> SFTTrainer:
    args = SFTConfig(
        output_dir=str(output), max_steps=steps, save_steps=1, use_cpu=True, bf16=False, report_to=[], max_length=64,
        per_device_train_batch_size=1, save_total_limit=None, **settings,
    )  # fmt: skip
    rows = Dataset.from_list([dict(row) for row in TEXT_ROWS])
    return trainer_class(model=str(model), args=args, train_dataset=rows)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, sft_folder: Path) -> Path:
    """A run of stock with three checkpoints."""
    output = tmp_path_factory.mktemp("saved") / "out"
    trainer(SFTTrainer, sft_folder / "model", output, 3).train()
    return output


@pytest.fixture
def output(saved: Path, material: Material) -> Path:
    shutil.copytree(saved, material.out)
    return material.out


def cut(name: str, keep: float = 0.5) -> Harm:
    def harm(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: int(len(content) * keep)])

    return harm


def gone(*names: str) -> Harm:
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


def as_pickle(keep: float) -> Harm:
    def harm(checkpoint: Path) -> None:
        torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
        (checkpoint / "model.safetensors").unlink()
        cut("pytorch_model.bin", keep)(checkpoint)

    return harm


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


HALF: list[tuple[str, Harm, str]] = [
    ("no state", gone("trainer_state.json"), "trainer_state.json is missing"),
    ("cut state", cut("trainer_state.json"), "trainer_state.json is cut short"),
    ("empty state", cut("trainer_state.json", 0), "trainer_state.json is cut short"),
    ("cut weights", cut("model.safetensors"), "model.safetensors is cut short"),
    ("weights without their end", cut("model.safetensors", 0.999), "model.safetensors is cut short"),
    ("empty weights", cut("model.safetensors", 0), "model.safetensors is empty"),
    ("cut pickle", as_pickle(0.5), "pytorch_model.bin is cut short"),
    ("empty pickle", as_pickle(0), "pytorch_model.bin is empty"),
    ("no weights", gone("model.safetensors"), "it holds no weights"),
    ("cut config", cut("config.json"), "config.json is cut short"),
    ("cut optimizer", cut("optimizer.pt"), "optimizer.pt is cut short"),
    ("cut scheduler", cut("scheduler.pt"), "scheduler.pt is cut short"),
    ("cut random state", cut("rng_state.pth"), "rng_state.pth is cut short"),
    ("an empty folder", emptied, "trainer_state.json is missing"),
]
WHOLE: list[tuple[str, Harm]] = [
    ("all", lambda checkpoint: None),
    ("a pickle", as_pickle(1)),
    ("no optimizer", gone("optimizer.pt", "scheduler.pt")),
    ("no random state", gone("rng_state.pth")),
    ("cut arguments", cut("training_args.bin")),
]


@pytest.mark.parametrize(("harm", "fault"), [row[1:] for row in HALF], ids=[row[0] for row in HALF])
def test_a_half_written_checkpoint_is_refused_and_stock_fails_on_it(
    output: Path, material: Material, harm: Harm, fault: str
) -> None:
    newest = output / "checkpoint-3"
    harm(newest)
    with pytest.raises(ValueError, match="is not a complete checkpoint") as caught:
        trainer(FastSFTTrainer, material.model, output, 4).train(resume_from_checkpoint=str(newest))
    assert all(part in str(caught.value) for part in (str(newest), fault, str(output / "checkpoint-2")))
    with pytest.raises(Exception):  # noqa: B017, PT011 - each its own, mostly none that helps
        trainer(SFTTrainer, material.model, output, 4).train(resume_from_checkpoint=str(newest))


@pytest.mark.parametrize("harm", [harm for _, harm in WHOLE], ids=[name for name, _ in WHOLE])
@pytest.mark.parametrize("trainer_class", [SFTTrainer, FastSFTTrainer])
def test_what_stock_resumes_from_is_complete(
    output: Path, material: Material, trainer_class: type[SFTTrainer], harm: Harm
) -> None:
    harm(output / "checkpoint-3")
    assert checkpoint_fault(output / "checkpoint-3") == ""
    resumed = trainer(trainer_class, material.model, output, 4)
    resumed.train(resume_from_checkpoint=str(output / "checkpoint-3"))
    assert resumed.state.global_step == 4


def test_true_takes_the_newest_complete_checkpoint_and_says_so(
    output: Path, material: Material, caplog: pytest.LogCaptureFixture
) -> None:
    gone("trainer_state.json")(output / "checkpoint-3")
    resumed = trainer(FastSFTTrainer, material.model, output, 3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    said = [record.getMessage() for record in caplog.records if "resume: checkpoint-3" in record.getMessage()]
    assert len(said) == 1
    assert all(part in said[0] for part in ("trainer_state.json is missing", f"taking {output / 'checkpoint-2'}"))
    # Trained anew from checkpoint-2, as stock would.
    stock = trainer(SFTTrainer, material.model, material.folder / "stock", 3)
    stock.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    for ours, theirs in zip(resumed.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_true_with_no_complete_checkpoint(output: Path) -> None:
    for checkpoint in output.glob("checkpoint-*"):
        gone("trainer_state.json")(checkpoint)
    with pytest.raises(ValueError, match=r"no checkpoint in output_dir .* is complete .*train from the start"):
        choose_checkpoint(True, str(output))


def test_from_the_command_line(
    output: Path, material: Material, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cut("model.safetensors")(output / "checkpoint-3")
    config = material.yaml(max_steps=3)
    line = refused(material, capsys, "--config", config, "--resume_from_checkpoint", output / "checkpoint-3")
    assert all(part in line for part in ("checkpoint-3", "model.safetensors is cut short", "checkpoint-2"))
    line = refused(material, capsys, "--config", config, "--resume_from_checkpoint", output)
    assert f"name {str(output / 'checkpoint-3')!r}" not in line
    assert f"name {str(output / 'checkpoint-2')!r}" in line
    assert main(["sft", "--config", str(config), "--resume_from_checkpoint", "true"]) == 0
    assert f"taking {output / 'checkpoint-2'}" in caplog.text


def test_a_missing_shard_and_a_cut_one_are_found(tmp_path: Path, material: Material) -> None:
    AutoModelForCausalLM.from_pretrained(material.model).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert weights_fault(tmp_path) == ""
    cut(shards[1].name)(tmp_path)
    assert f"{shards[1].name} is cut short" in weights_fault(tmp_path)
    shards[1].unlink()
    assert f"{shards[1].name} is missing" in weights_fault(tmp_path)


def test_a_cut_adapter_is_found(tmp_path: Path, material: Material) -> None:
    model = AutoModelForCausalLM.from_pretrained(material.model)
    get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    assert weights_fault(tmp_path) == ""
    cut("adapter_model.safetensors")(tmp_path)
    assert "adapter_model.safetensors is cut short" in weights_fault(tmp_path)


def test_cut_weights_of_the_model_in_python(tmp_path: Path, material: Material) -> None:
    model = shutil.copytree(material.model, tmp_path / "model")
    cut("model.safetensors")(model)
    with pytest.raises(ValueError, match=r"cannot be loaded: model\.safetensors is cut short"):
        trainer(FastSFTTrainer, model, tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["/proc/absent/out", "file/out"])
def test_an_output_dir_that_cannot_be_made_is_refused_before_the_data_are_read(
    tmp_path: Path, material: Material, name: str
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"output_dir '.*out': (nothing can be written in '/proc'|'.*' is a file)"):
        FastSFTTrainer(model=str(material.model), args=SFTConfig(output_dir=str(tmp_path / name), bf16=False))


def test_a_folder_that_is_only_read_will_do_for_a_run_that_saves_nothing() -> None:
    check_output_dir(SFTConfig(output_dir="/proc", save_strategy="no", bf16=False, use_cpu=True))
    with pytest.raises(ValueError, match="nothing can be written in '/proc'"):
        check_output_dir(SFTConfig(output_dir="/proc", bf16=False, use_cpu=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is below 1"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps=-1 is below 1"),
        ({"max_length": 0}, "max_length=0 is below 1"),
        ({"per_device_eval_batch_size": 0, "eval_strategy": "epoch"}, "per_device_eval_batch_size=0 is below 1"),
        ({"per_device_eval_batch_size": 0}, ""),
    ],
)
@pytest.mark.parametrize("config_class", [SFTConfig, FastSFTConfig])
def test_counts_below_one(
    tmp_path: Path, material: Material, config_class: type[SFTConfig], settings: dict[str, Any], said: str
) -> None:
    rows = Dataset.from_list([dict(row) for row in TEXT_ROWS[:4]])
    # What is not evaluated needs no count, as in stock.
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        args = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **settings)
        FastSFTTrainer(model=str(material.model), args=args, train_dataset=rows, eval_dataset=rows)
