"""What a complete checkpoint is: what TRL resumes. Of several, the newest complete one is taken."""

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
from sft_material import TEXT_ROWS, Material
from torch.distributed import checkpoint as distributed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from fastpack_trl.model.preflight import checkpoint_fault, choose_checkpoint, newest_checkpoint
from fastpack_trl.testing import tiny_model

ROWS = Dataset.from_list([dict(row) for row in TEXT_ROWS])


def damage(file: Path, how: str) -> None:
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def train(model: Path, output: Path, steps: int, adapter: Any, resume: Path | None = None) -> None:
    more = {"bf16": False, "use_cpu": True, "report_to": [], "max_length": 32, "per_device_train_batch_size": 1}
    args = SFTConfig(output_dir=str(output), max_steps=steps, save_steps=1, **more)
    SFTTrainer(str(model), args=args, train_dataset=ROWS, peft_config=adapter).train(resume and str(resume))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["full", "lora"])
def test_a_checkpoint_is_complete_if_trl_resumes_from_it(material: Material, adapter: Any) -> None:
    """Each of its files is missing or cut."""
    train(material.model, material.out, 2, adapter)
    newest, older = material.out / "checkpoint-2", material.out / "checkpoint-1"
    whole, refused = shutil.copytree(newest, material.folder / "whole"), set()
    files = sorted(file.name for file in whole.iterdir())
    for name, how in product(files, ("missing", "cut")):
        shutil.rmtree(newest)
        damage(shutil.copytree(whole, newest) / name, how)
        chosen, warning = choose_checkpoint(True, str(material.out))
        assert newest_checkpoint(str(material.out)) == (older if warning else newest)
        assert chosen == (str(older) if warning else True)
        try:
            train(material.model, material.folder / "resumed", 3, adapter, newest)
        except Exception:  # noqa: BLE001 - TRL does not check
            refused.add((name, how))
            assert name in warning or "it holds no weights" in warning
        else:
            assert not warning, (name, how)
    assert len(files) > 8
    assert {name for name, how in refused if how == "cut"} >= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


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
