"""Whoever trains an adapter reads no FutureWarning of a name that PEFT and TRL read: transformers 5.23 renamed it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from preference_material import NAMES, build
from trainer_material import build as build_sft
from transformers import PreTrainedModel

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


@pytest.mark.parametrize("name", ["SFT", *NAMES])
def test_training_an_adapter_shows_no_warning_of_the_renamed_property(
    name: str, tmp_path: Path, caught: Caught
) -> None:
    options = {"max_steps": 1, "eval_strategy": "no", "gradient_checkpointing": True}
    if name == "SFT":
        adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
        trainer = build_sft(FastSFTTrainer, tmp_path, trainer=adapter, fast={}, **options)
    else:
        trainer = build(name, tmp_path, fast=True, **options)
    trainer.train()
    assert trainer.state.global_step == 1
    assert not is_shown(caught)


def test_a_command_that_loads_an_adapter_shows_none(tmp_path: Path, caught: Caught) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    caught.clear()
    assert main(["verify", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert not is_shown(caught)


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "is_activation_checkpointing"), reason="this transformers has the old name alone"
)
def test_outside_of_a_trainer_the_property_warns_as_before(tmp_path: Path, caught: Caught) -> None:
    trainer = build_sft(FastSFTTrainer, tmp_path, max_steps=1, eval_strategy="no")
    trainer.train()
    assert not is_shown(caught)
    assert trainer.model.is_gradient_checkpointing == trainer.model.is_activation_checkpointing
    assert is_shown(caught)
