"""Dense copies of frozen weights take what activations leave of a budget, and go first when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import adapted
from out_of_memory import too_large
from quantised_material import quantised
from trainer_material import build, figures, train

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.checkpointing.activation_memory import ActivationMemory, activation_memory
from fastpack_trl.checkpointing.plan import Level, Plan
from fastpack_trl.lora.cache_dequantized import cache_dequantized
from fastpack_trl.lora.feature import lora
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.lora.report import LoraReport

GIB = 2**30
# 14 projections of a llama with two layers, widths 64 and 128, two of four heads for keys and values.
COPIES = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4


def trainer_with(folder: Path, budget: float | None, cache: str = "auto", **more: Any) -> FastSFTTrainer:
    fast = {"activation_memory_gib": None if budget is None else budget / GIB, "cache_dequantized": cache}
    trainer = build(
        FastSFTTrainer, folder, model=quantised("nf4", nested=True), fast=fast, packing=True, eval_strategy="no",
        **{"max_steps": 3, **more},
    )  # fmt: skip
    assert isinstance(trainer, FastSFTTrainer)
    return trainer


@contextmanager
def decided(trainer: FastSFTTrainer) -> Iterator[Plan]:
    """The three features as `train` enters them."""
    trainer.fastpack_run.training = True
    with ExitStack() as stack:
        for feature in (lora, activation_memory, cache_dequantized):
            stack.enter_context(feature(trainer.fastpack_run))
        memory = trainer.fastpack_run.get_state(ActivationMemory)
        assert memory is not None, str(trainer.fastpack_report)
        yield memory.plan


def kept(trainer: FastSFTTrainer) -> list[bool]:
    return [module.fastpack_dense is not None for module in trainer.model.modules() if isinstance(module, FastLora)]


def test_activations_come_first_and_copies_take_what_they_leave(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, GIB)
    with decided(trainer) as plan:
        assert set(plan.levels) == {Level.KEEP}
        assert kept(trainer) == [True] * 14
        report = trainer.fastpack_run.get_state(LoraReport)
        assert report is not None
        assert report.copies.nbytes == COPIES
        line = trainer.fastpack_report["cache_dequantized"]
        assert (line.status, line.path) == ("on", "kept")
        assert "left by activation_memory, whose kept layers come first" in line.reason
    assert trainer.fastpack_run.get_state(LoraReport) is None
    trainer.args.activation_memory_gib = (plan.predicted + COPIES + GIB - plan.budget) / GIB
    with decided(trainer) as scarce:  # where memory is not ample, what backward works with is measured too
        predicted = scarce.predicted
    for more, there in ((COPIES, True), (COPIES - 1000, False), (-1000, False)):
        trainer.args.activation_memory_gib = (predicted + more) / GIB
        # The head's activations are set apart before: the budget is found from what the first plan lacked.
        trainer.args.activation_memory_gib += (GIB - plan.budget) / GIB
        with decided(trainer) as tight:
            assert (set(tight.levels) == {Level.KEEP}) == (more >= 0)
            assert more < 0 or tight.left == pytest.approx(more, abs=2)
            assert kept(trainer) == [there] * 14, (more, str(trainer.fastpack_report))
            left = trainer.fastpack_run.step.activations_left  # for graphs
            assert left == (tight.left - COPIES * there if more >= 0 else 0)
        line = trainer.fastpack_report["cache_dequantized"]
        assert (line.status == "on") == there
        assert there or f"frozen weights are made per use: copies take {COPIES / 2**20:.2f} MiB" in line.reason


def test_no_copy_is_made_of_what_is_too_little_for_a_further_layer(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, GIB, max_length=4096)
    with decided(trainer) as plan:
        assert set(plan.levels) == {Level.KEEP}
    # A byte too few for the last layer: what is left then is more than all copies take.
    trainer.args.activation_memory_gib = (plan.predicted - 1 + GIB - plan.budget) / GIB
    with decided(trainer) as tight:
        assert not tight.keeps_all
        assert tight.left > COPIES
        assert not any(kept(trainer))
    assert "whose kept layers come first" in trainer.fastpack_report["cache_dequantized"].reason
    # A level that is asked for has nothing to do with memory: copies have what it leaves.
    trainer.args.activation_memory, trainer.args.activation_memory_gib = "checkpoint", 1.0
    with decided(trainer) as asked:
        assert set(asked.levels) == {Level.CHECKPOINT}
        assert all(kept(trainer))


@pytest.mark.parametrize(("cache", "there"), [("on", True), ("off", False)])
def test_asked_for_the_plan_has_no_say(tmp_path: Path, cache: str, there: bool) -> None:
    trainer = trainer_with(tmp_path, GIB if cache == "off" else 1000, cache)
    with decided(trainer):
        assert kept(trainer) == [there] * 14
    line = trainer.fastpack_report["cache_dequantized"]
    assert (line.status, line.reason == "switched off") == (cache, cache == "off")


def test_without_a_plan_on_the_cpu_nothing_is_kept(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, None, max_steps=1)
    trainer.train()
    assert trainer.fastpack_report["cache_dequantized"].reason.startswith("frozen weights are cast per use (cpu")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"cache_dequantized": "on"}, "every frozen weight of the fast LoRA layers is in the dtype of the run already"),
    ],
)
def test_a_model_that_needs_no_copies_has_a_line_of_them_where_they_were_asked_for(
    tmp_path: Path, fields: dict[str, str], why: str | None
) -> None:
    assert not apply_lora(adapted("llama")).copies
    trainer = train(
        FastSFTTrainer, tmp_path, model=adapted("llama"), fast=fields, packing=True, eval_strategy="no", max_steps=1
    )
    assert isinstance(trainer, FastSFTTrainer)
    assert "lora" in trainer.fastpack_report
    assert ("cache_dequantized" in trainer.fastpack_report) == (why is not None)
    if why is not None:
        line = trainer.fastpack_report["cache_dequantized"]
        assert (line.status, line.reason) == ("off", why)


def test_copies_go_before_activations_when_a_step_runs_out_of_memory(tmp_path: Path) -> None:
    results = []
    for times in (0, 1, 2):
        torch.manual_seed(0)
        trainer = trainer_with(tmp_path / str(times), GIB)
        with too_large(trainer, "forward", times) as calls:
            trainer.train()
        assert len(calls) == times
        results.append(figures(trainer))
        copies, memory = trainer.fastpack_report["cache_dequantized"], trainer.fastpack_report["activation_memory"]
        assert copies.path == ("kept" if times == 0 else "per use")
        assert ("a step ran out of memory" in copies.reason) == (times > 0)
        assert (memory.path == "keep") == (times < 2)
        assert ("without what is spare" in memory.reason) == (times == 1)
        assert not any(isinstance(module, FastLora) for module in trainer.model.modules())
    assert results[0] == results[1] == results[2]
