"""Walks over a model that are spared: same results, and PEFT's own switch where more than a flag changes."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from preference_material import assert_same, both

from fastpack_trl.step.hostwork import HostWork
from fastpack_trl.testing import tiny_model
from fastpack_trl.trainers.adapter_switch import quick_switch


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that PEFT reads the state of all layers."""
    found: list[int] = []
    stock = PeftModel.get_model_status
    monkeypatch.setattr(PeftModel, "get_model_status", lambda self: found.append(1) or stock(self))
    return found


class Trainer:
    """What `HostWork` reads of one."""

    optimizer = None

    def __init__(self, model: Any) -> None:
        self.model = model


@contextlib.contextmanager
def hosting(**options: Any) -> Any:
    """A model inside of a run's host work."""
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))
    trainer = Trainer(model)
    host = HostWork()
    with host.running(trainer), quick_switch(model, host.contents):
        yield model
    assert not {"disable_adapter", "train", "zero_grad"} & vars(model).keys()


def test_steps_with_a_reference_are_equal_and_without_walks(tmp_path: Path, walks: list[int]) -> None:
    ours, stock = both("DPO", tmp_path, max_steps=4, eval_steps=4)
    assert_same(ours, stock)
    assert len(walks) <= 4 + 4 + 4, "stock's four steps and evaluations, and ours in evaluation at most"


@pytest.mark.parametrize("case", ["gradients", "a frozen adapter", "modules_to_save", "a copy"])
def test_peft_switches_itself_where_more_than_a_flag_changes(case: str, walks: list[int]) -> None:
    with hosting(**({"modules_to_save": ["lm_head"]} if case == "modules_to_save" else {})) as model:
        used = copy.deepcopy(model) if case == "a copy" else model
        if case == "a frozen adapter":
            next(value for name, value in used.named_parameters() if "lora_A" in name).requires_grad_(False)
        with torch.set_grad_enabled(case == "gradients"), used.disable_adapter():
            assert walks
            assert all(layer.disable_adapters for layer in used.modules() if hasattr(layer, "lora_A"))
        assert not any(layer.disable_adapters for layer in used.modules() if hasattr(layer, "lora_A"))


def test_an_error_leaves_adapters_on() -> None:
    with hosting() as model, torch.no_grad():
        with pytest.raises(KeyError), model.disable_adapter():
            raise KeyError
        assert not any(layer.disable_adapters for layer in model.modules() if hasattr(layer, "lora_A"))
