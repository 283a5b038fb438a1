"""Versions of transformers and PEFT that do not fit: no warning that users cannot act on, and no run that is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from preference_material import NAMES, build
from trainer_material import build as build_sft
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastpack_trl import FastSFTTrainer
from fastpack_trl.cli.main import main
from fastpack_trl.testing import tiny_model

Caught = list[warnings.WarningMessage]


@pytest.fixture
def caught() -> Iterator[Caught]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        yield shown


def is_shown(caught: Caught) -> bool:
    return any(str(warning.message).startswith("`is_gradient_checkpointing` is deprecated") for warning in caught)


def make(name: str, folder: Path, *, lora: bool, **options: Any) -> Any:
    options = {"max_steps": 2, "eval_strategy": "no"} | options
    if name != "SFT":
        return build(name, folder, fast=True, lora=lora, **options)
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    return build_sft(FastSFTTrainer, folder, trainer=adapter, fast={}, **options)


@pytest.mark.parametrize("name", ["SFT", *NAMES])
def test_training_an_adapter_shows_no_warning_of_the_renamed_property(
    name: str, tmp_path: Path, caught: Caught
) -> None:
    trainer = make(name, tmp_path, lora=True, max_steps=1, gradient_checkpointing=True)
    trainer.train()
    assert trainer.state.global_step == 1
    assert not is_shown(caught)
    if name == "SFT" and hasattr(PreTrainedModel, "is_activation_checkpointing"):  # outside it warns as before
        model = trainer.model.get_base_model()
        assert model.is_gradient_checkpointing == model.is_activation_checkpointing
        assert is_shown(caught)


def save_adapter(folder: Path) -> tuple[Path, Path]:
    """Folders of a model and of an adapter for it."""
    tiny_model("qwen3").save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")  # whose folder the adapter names
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def test_a_command_that_loads_an_adapter_shows_none(tmp_path: Path, caught: Caught) -> None:
    model, adapter = save_adapter(tmp_path)
    caught.clear()
    assert main(["verify", "--model", str(model), "--adapter", str(adapter)]) == 0
    assert not is_shown(caught)


@pytest.mark.parametrize("name", ["SFT", "KTO"])
def test_an_adapter_that_cannot_be_saved_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    base, adapter = save_adapter(tmp_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(adapter)
    except ImportError:
        pytest.skip("this transformers loads no adapter by this PEFT")
    saving: dict[str, Any] = {"lora": False, "save_steps": 1, "save_strategy": "steps"}
    try:
        model.active_adapters()
    except ValueError:  # transformers 5.24 and PEFT before 0.22
        with pytest.raises(ValueError, match=r"cannot be saved with the installed .*PeftModel.from_pretrained"):
            make(name, tmp_path / "run", model=model, **saving)
    else:
        make(name, tmp_path / "run", model=model, **saving)
    make(name, tmp_path / "unsaved", lora=False, model=model, save_strategy="no")
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    make(name, tmp_path / "wrapped", model=wrapped, **saving).train()
    assert (tmp_path / "wrapped" / "checkpoint-2" / "adapter_model.safetensors").is_file()
