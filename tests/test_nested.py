"""Trainers in the same process: inside of each other's training, and other code, which sees nothing of ours."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from moe_material import moe_model
from peft import LoraConfig
from side_by_side import assert_equal
from trainer_material import assert_same_log, build, callback, figures, make_dataset, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "peft", "torch", "transformers", "trl")
ALL = ("evaluate", "train", "evaluate")


def once(event: str, step: int, run: Any) -> Any:
    """A callback that runs `run`, given the model, once: in an event of a step."""
    return callback(event, lambda state, model: run(model) if state.global_step == step else None)()


def nested(
    outer: type[SFTTrainer], inner: type[SFTTrainer], folder: Path, calls: tuple[str, ...], **options: Any
) -> tuple[Any, Any, list[dict[str, float]]]:
    """A trainer, one that is made and called on its model after the second step, and all figures that they logged."""
    family, made = options.pop("family", "qwen3"), []

    def nest(model: Any) -> None:
        if not made:
            data = {"train_dataset": make_dataset("text", seed=3)}
            settings = {"packing": True, "max_steps": 2, "eval_strategy": "no"} | options
            made.append(build(inner, folder / "inner", model=model, trainer=data, **settings))
            for call in calls:
                getattr(made[0], call)()

    given = {"callbacks": [once("on_step_end", 2, nest)]}
    trainer = train(outer, folder / "outer", model=tiny_model(family), packing=True, trainer=given, **options)
    logs = figures(trainer) + figures(made[0])
    trainer.train()
    return trainer, made[0], logs + figures(trainer)


def assert_restored(model: Any, implementation: str) -> None:
    assert model.config._attn_implementation == implementation
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_fastpack")]


@pytest.mark.parametrize(("calls", "options"), [((), {}), (ALL, {}), (ALL, {"gradient_accumulation_steps": 2})])
def test_trainers_in_callbacks_log_as_stocks(tmp_path: Path, calls: tuple[str, ...], options: dict[str, Any]) -> None:
    *_, expected = nested(SFTTrainer, SFTTrainer, tmp_path / "stock", calls, **options)
    pairs = [(FastSFTTrainer, FastSFTTrainer)]
    if calls == ALL and not options:
        pairs += [(FastSFTTrainer, SFTTrainer), (SFTTrainer, FastSFTTrainer)]
    for outer, inner in pairs:
        first, second, logs = nested(outer, inner, tmp_path / f"{outer.__name__}-{inner.__name__}", calls, **options)
        assert_equal(logs, expected)
        for trainer in (first, second):
            if isinstance(trainer, FastSFTTrainer):
                assert trainer.fastpack_report["packed_attention"].path == "per_document"
                if trainer is first or "train" in calls:
                    assert trainer.fastpack_report["sync_free"].path == "loss, metrics, host work"
        assert_restored(first.model, "sdpa")


def library_state() -> dict[tuple[str, ...], Any]:
    """Every function and class of the loaded libraries by its place, module or class."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if name.partition(".")[0] in LIBRARIES and module else ():
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                members = {inner: member for inner, member in list(vars(value).items()) if callable(member)}
                found |= {(name, key, inner): member for inner, member in members.items()}
    return found


def changed(before: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Names whose object is another one now, and new members of a class: a library imports most of itself on use."""
    now, classes = library_state(), {place[:2] for place in before if len(place) == 3}
    added = (place for place in now.keys() - before.keys() if len(place) == 3 and place[:2] in classes)
    return [*(place for place, value in before.items() if now.get(place) is not value), *added]


def make(cls: type[SFTTrainer], folder: Path, family: str, *, lora: bool = False, **more: Any) -> SFTTrainer:
    # Padded rows: stock counts the padding in its auxiliary loss, ours does not.
    options = {"packing": True, "pad_to_multiple_of": 64, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
    adapters = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    model = moe_model(family, vocab_size=96) if family.endswith("moe") else None
    return build(cls, folder, family=family, model=model, trainer=adapters, **options, **more)


@pytest.mark.parametrize(("family", "lora"), [("qwen3", False), ("qwen3_moe", True), ("granitemoe", False)])
def test_training_changes_no_function_or_class_of_a_library(tmp_path: Path, family: str, lora: bool) -> None:
    make(FastSFTTrainer, tmp_path / "first", family, lora=lora, max_steps=1).train()  # loads what is loaded on use
    trainer = make(FastSFTTrainer, tmp_path / "second", family, lora=lora, max_steps=2)
    before, during = library_state(), []
    trainer.add_callback(once("on_step_begin", 1, lambda _: during.append(changed(before))))
    trainer.train()
    assert during == [[]]
    assert changed(before) == []


@pytest.mark.parametrize("first", [0, 1], ids=["outer-first", "inner-first"])
def test_runs_that_overlap_may_end_in_either_order(tmp_path: Path, first: int) -> None:
    alone = make(SFTTrainer, tmp_path / "alone", "qwen3_moe", max_steps=3)
    alone.train()
    before = library_state()
    pair = [make(FastSFTTrainer, tmp_path / str(index), "qwen3_moe", max_steps=2) for index in range(2)]
    stacks = [ExitStack() for _ in pair]
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
