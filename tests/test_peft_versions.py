"""Versions of transformers and PEFT that do not fit: no run is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from preference_material import build
from trainer_material import build as build_sft
from transformers import AutoModelForCausalLM

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model


def save_adapter(folder: Path) -> tuple[Path, Path]:
    """Folders of a model and of an adapter for it."""
    tiny_model("qwen3").save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")  # whose folder the adapter names
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def make(name: str, folder: Path, model: Any, save_strategy: str) -> Any:
    options = {"max_steps": 2, "save_steps": 1, "eval_strategy": "no", "save_strategy": save_strategy}
    if name == "SFT":
        return build_sft(FastSFTTrainer, folder, model=model, fast={}, **options)
    return build(name, folder, fast=True, lora=False, model=model, **options)


@pytest.mark.parametrize("name", ["SFT", "KTO"])
def test_an_adapter_that_cannot_be_saved_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    base, adapter = save_adapter(tmp_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(adapter)
    except ImportError:
        pytest.skip("this transformers loads no adapter by this PEFT")
    try:
        model.active_adapters()
    except ValueError:  # transformers 5.24 and PEFT before 0.22
        with pytest.raises(ValueError, match=r"cannot be saved with the installed .*PeftModel.from_pretrained"):
            make(name, tmp_path / "run", model, "steps")
    else:
        make(name, tmp_path / "run", model, "steps")
    make(name, tmp_path / "unsaved", model, "no")
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    make(name, tmp_path / "wrapped", wrapped, "steps").train()
    assert (tmp_path / "wrapped" / "checkpoint-2" / "adapter_model.safetensors").is_file()
