"""Code beside `FastSFTTrainer` in the same process sees nothing of it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from moe_material import moe_model
from peft import LoraConfig
from trainer_material import assert_same_log, build
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "peft", "torch", "transformers", "trl")


def library_state() -> dict[tuple[str, ...], Any]:
    """Every function and class of the loaded libraries by its places, module or class; those of classes too."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or module is None:
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, member in list(vars(value).items()):
                    if callable(member) or inner in ("attribute_map", "model_type"):
                        found[name, key, inner] = dict(member) if isinstance(member, dict) else member
    return found


def changed(before: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Names whose object is another one now, and new members of a class that was there.

    New names of a module do not count: a library imports most of itself on use.
    """
    now = library_state()
    missing = object()
    classes = {place[:2] for place in before if len(place) == 3}
    return [
        place
        for place, value in before.items()
        if (other := now.get(place, missing)) is not value and not (isinstance(value, dict) and other == value)
    ] + [place for place in now.keys() - before.keys() if len(place) == 3 and place[:2] in classes]


def make(cls: type[SFTTrainer], folder: Path, family: str, *, lora: bool = False, **more: Any) -> SFTTrainer:
    # Padded rows: stock counts the padding in its auxiliary loss, ours does not.
    options = {"packing": True, "pad_to_multiple_of": 64, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
    adapters = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    model = moe_model(family, vocab_size=96) if family.endswith("moe") else None
    return build(cls, folder, family=family, model=model, trainer=adapters, **options, **more)


class Inside(TrainerCallback):
    """Calls `run` once, in the second step."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.run()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "granitemoe"])
def test_training_changes_no_function_or_class_of_a_library(tmp_path: Path, family: str, lora: bool) -> None:
    make(FastSFTTrainer, tmp_path / "first", family, lora=lora, max_steps=1).train()  # loads what is loaded on use
    trainer = make(FastSFTTrainer, tmp_path / "second", family, lora=lora, max_steps=2)
    before, during = library_state(), []
    trainer.add_callback(Inside(lambda: during.append(changed(before))))
    trainer.train()
    assert during == [[]]
    assert changed(before) == []


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_stock_trainer_inside_of_ours_is_stock(tmp_path: Path, family: str, lora: bool) -> None:
    alone = make(SFTTrainer, tmp_path / "alone", family, lora=lora)
    alone.train()
    stock = make(SFTTrainer, tmp_path / "stock", family, lora=lora)
    ours = make(FastSFTTrainer, tmp_path / "ours", family, lora=lora)
    ours.add_callback(Inside(stock.train))
    ours.train()
    assert_same_log(stock, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [0, 1], ids=["outer-first", "inner-first"])
def test_runs_that_overlap_may_end_in_either_order(tmp_path: Path, first: int) -> None:
    alone = make(SFTTrainer, tmp_path / "alone", "qwen3_moe", max_steps=3)
    alone.train()
    before = library_state()
    pair = [make(FastSFTTrainer, tmp_path / str(index), "qwen3_moe", max_steps=2) for index in range(2)]
    stacks = [contextlib.ExitStack() for _ in pair]
    for trainer, stack in zip(pair, stacks, strict=True):
        stack.enter_context(trainer._fastpack_features(announce=True))
    stacks[first].close()
    stacks[1 - first].close()
    assert changed(before) == []
    for trainer in pair:
        assert trainer.model.config._attn_implementation in ("sdpa", "eager")
        assert trainer.model.config._experts_implementation == "grouped_mm"
    stock = make(SFTTrainer, tmp_path / "stock", "qwen3_moe", max_steps=3)
    stock.train()
    assert_same_log(stock, alone, rtol=1e-6, atol=1e-6)
