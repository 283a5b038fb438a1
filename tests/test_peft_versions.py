"""Versions of transformers and PEFT that do not fit: no warning that users cannot act on, and no run that is lost."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from preference_material import build
from trainer_material import build as build_sft
from transformers import AutoModelForCausalLM

from fastpack_trl import FastSFTTrainer
from fastpack_trl.cli.main import main
from fastpack_trl.testing import tiny_model

ADAPTER = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)


def make(name: str, folder: Path, **options: Any) -> Any:
    options = {"max_steps": 1, "eval_strategy": "no"} | options
    if name == "SFT":
        return build_sft(FastSFTTrainer, folder, **options)
    return build(name, folder, fast=True, lora=False, **options)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a model and of an adapter that names it."""
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), ADAPTER)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "model", tmp_path / "adapter"


def test_no_warning_of_the_renamed_property_in_a_run_or_a_command(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("SFT", "DPO", "GRPO"):
            make(name, tmp_path, trainer={"peft_config": ADAPTER}, gradient_checkpointing=True).train()
        assert main(["verify", "--model", str(folders[0]), "--adapter", str(folders[1])]) == 0
    assert not [one for one in caught if "`is_gradient_checkpointing` is deprecated" in str(one.message)]


@pytest.mark.parametrize("name", ["SFT", "KTO"])
def test_adapters_that_cannot_be_saved_are_refused_first(name: str, tmp_path: Path, folders: tuple[Path, Path]) -> None:
    saving: dict[str, Any] = {"save_steps": 1, "save_strategy": "steps"}
    try:
        model = AutoModelForCausalLM.from_pretrained(folders[1])
    except ImportError:
        pytest.skip("this transformers loads no adapter by this PEFT")
    try:
        model.active_adapters()
    except ValueError:  # transformers 5.24 and PEFT before 0.22
        with pytest.raises(ValueError, match=r"cannot be saved with the installed .*PeftModel.from_pretrained"):
            make(name, tmp_path / "run", model=model, **saving)
    else:
        make(name, tmp_path / "run", model=model, **saving)
    make(name, tmp_path / "unsaved", model=model, save_strategy="no")
    base = AutoModelForCausalLM.from_pretrained(folders[0])
    wrapped = PeftModel.from_pretrained(base, folders[1], is_trainable=True)
    make(name, tmp_path / "wrapped", model=wrapped, **saving).train()
    assert (tmp_path / "wrapped" / "checkpoint-1" / "adapter_model.safetensors").is_file()
