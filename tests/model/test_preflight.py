"""Checks before anything is loaded: checkpoints that TRL would not resume, damaged weights, the output folder."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from sft_material import TEXT_ROWS, Material, refused
from torch.distributed import checkpoint as distributed
from transformers import AutoModel
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.preflight import (
    check_output_dir,
    checkpoint_fault,
    choose_checkpoint,
    newest_checkpoint,
    unwritable,
)
from fastpack_trl.testing import tiny_model

ROWS = Dataset.from_list([dict(row) for row in TEXT_ROWS])


def trainer(
    cls: type[SFTTrainer], model: Any, output: Path, steps: int = 4, rows: Any = ROWS, adapter: Any = None
) -> Any:
    more = {"bf16": False, "report_to": [], "max_length": 64, "per_device_train_batch_size": 1}
    args = SFTConfig(output_dir=str(output), max_steps=steps, save_steps=1, use_cpu=True, **more)
    given = str(model) if isinstance(model, Path) else model
    return cls(model=given, args=args, train_dataset=rows, peft_config=adapter)


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


def damage(file: Path, how: str) -> None:
    file.unlink() if how == "missing" else cut(file)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["full", "lora"])
def test_a_checkpoint_is_complete_if_trl_resumes_from_it(material: Material, adapter: Any) -> None:
    """Each of its files is missing or cut."""
    trainer(SFTTrainer, material.model, material.out, 2, adapter=adapter).train()
    newest, older = material.out / "checkpoint-2", material.out / "checkpoint-1"
    whole, refused = shutil.copytree(newest, material.folder / "whole"), set()
    own = ("adapter_", "README") if adapter else ("",)  # the other files are those of the full model
    files = sorted(file.name for file in whole.iterdir() if file.name.startswith(own))
    for name, how in product(files, ("missing", "cut")):
        shutil.rmtree(newest)
        damage(shutil.copytree(whole, newest) / name, how)
        chosen, warning = choose_checkpoint(True, str(material.out))
        assert newest_checkpoint(str(material.out)) == (older if warning else newest)
        assert chosen == (str(older) if warning else True)
        try:
            again = trainer(SFTTrainer, material.model, material.folder / "resumed", 3, adapter=adapter)
            again.train(str(newest))
        except Exception:  # noqa: BLE001 - TRL does not check
            refused.add((name, how))
            assert name in warning or "it holds no weights" in warning
        else:
            assert not warning, (name, how)
    assert len(files) > (1 if adapter else 8)
    least = {"adapter_model.safetensors"} if adapter else {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {name for name, how in refused if how == "cut"} >= least


def test_every_form_of_a_checkpoint_is_complete_until_a_file_of_it_is_damaged(tmp_path: Path) -> None:
    model, state = tiny_model("qwen3"), {"weight": torch.arange(500.0)}

    def checkpoint(*parts: str) -> Path:
        folder = tmp_path.joinpath(*parts)
        folder.mkdir(parents=True)
        (tmp_path / parts[0] / "trainer_state.json").write_text("{}", encoding="utf-8")
        return folder

    model.save_pretrained(checkpoint("shards"), max_shard_size="40KB")
    torch.save(model.state_dict(), checkpoint("bin") / "pytorch_model.bin")
    for name in ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save(state, tmp_path / "bin" / name, _use_new_zipfile_serialization=name != "rng_state_0.pth")
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        distributed.save(state, checkpoint_id=checkpoint("fsdp 2", part), no_dist=True)
    for part in ("default", "reference"):
        torch.save(state, checkpoint("adapters", part) / "adapter_model.bin")
    torch.save(state, checkpoint("deepspeed", "global_step3") / "mp_rank_00_model_states.pt")
    (tmp_path / "deepspeed" / "latest").write_text("global_step3", encoding="utf-8")
    read = ("model-", "index.json", "pytorch_model.bin", "optimizer.pt", "state_1.pth", "distcp", "metadata", "adapter")
    optional = {"optimizer.pt", "rng_state_1.pth", "adapter_model.bin", "mp_rank_00_model_states.pt", "config.json"}
    count = 0
    for folder in sorted(tmp_path.iterdir()):
        (folder / "stats.bin").write_bytes(b"of a callback")
        assert checkpoint_fault(folder) == "", folder
        for file in [file for file in folder.rglob("*") if any(part in file.name for part in (*read, "states.pt"))]:
            for how in ("missing", "cut") if file.name not in optional else ("cut",):
                content = file.read_bytes()
                damage(file, how)
                named = [file.name, "no weights"] if how == "missing" else [file.name]
                assert any(part in checkpoint_fault(folder) for part in named), (folder, file, how)
                file.write_bytes(content)
                count += 1
    assert count > 20


@pytest.mark.parametrize(
    "name",
    ["best-8", "8-old-2", "", "8.bak", "-3", "٩", "9 ", "9\n", "best", "1e9", "+9", "9" * 200, "9/file"],
)  # fmt: skip
def test_folders_that_are_no_checkpoint_are_passed_over_as_transformers_does(tmp_path: Path, name: str) -> None:
    odd = tmp_path / f"checkpoint-{name.partition('/')[0]}"
    odd.write_text("") if "/" in name else odd.mkdir()
    for step in (1, 10):
        train_state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        train_state.parent.mkdir()
        train_state.write_text(json.dumps({}), encoding="utf-8")
        torch.save({}, train_state.parent / "pytorch_model.bin")
    chosen, warning = choose_checkpoint(True, str(tmp_path))
    last = Path(str(get_last_checkpoint(str(tmp_path))))
    assert (chosen, last.name) == (True, "checkpoint-10") or (odd, str(tmp_path / "checkpoint-10")) == (last, chosen)
    assert bool(warning) == (last == odd)
    assert newest_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-10"
