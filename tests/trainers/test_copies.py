"""Deep copies and pickles of a trainer: a copy trains as TRL's does, with its own rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_material
from accelerate.state import GradientState
from preference_material import assert_same, build
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

Maker = Callable[[Path, bool], Any]


def sft(**more: Any) -> Maker:
    return lambda folder, fast: trainer_material.build(FastSFTTrainer if fast else SFTTrainer, folder, **more)


def scoring(name: str, **more: Any) -> Maker:
    return lambda folder, fast: build(name, folder, fast=fast, max_steps=2, eval_strategy="no", **more)


MAKERS = {"sft packed": sft(packing=True), "sft": sft(), "dpo with reference": scoring("DPO", lora=False)}
MAKERS["rloo"] = scoring("RLOO")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_deep_copy_trains_as_the_copy_of_trl_does(make: Maker, tmp_path: Path) -> None:
    ours, stock = (copy.deepcopy(copy.deepcopy(make(tmp_path / str(fast), fast))) for fast in (True, False))
    original = make(tmp_path / "original", True)
    copied = copy.deepcopy(original)
    before = [parameter.clone() for parameter in original.model.parameters()]
    for runner in (ours, stock, copied):
        torch.manual_seed(0)
        runner.train()
    assert all(map(torch.equal, before, original.model.parameters()))
    torch.manual_seed(0)
    original.train()
    for runner in (ours, copied, original, copy.deepcopy(original)):
        assert runner.fastpack_run.trainer is runner
        assert runner.fastpack_report["batches"].status == "on", runner.fastpack_report
        assert_same(runner, stock, atol=2e-5)
        if rows := getattr(runner, "_fastpack_rows", None):
            assert rows.ran == original._fastpack_rows.ran >= 2, "the copy ran over rows of its own"
        else:
            assert runner.fastpack_report["sync_free"].path == "loss, metrics, host work"


@pytest.mark.parametrize("name", ["sft packed", "dpo with reference"])
def test_a_trainer_that_trl_can_pickle_is_pickled(name: str, tmp_path: Path) -> None:
    GradientState._reset_state()  # a run in this process leaves a weak reference in it, which no trainer can pickle
    loaded = pickle.loads(pickle.dumps(MAKERS[name](tmp_path, True)))
    assert loaded.fastpack_run.trainer is loaded
    with pytest.raises(AttributeError, match="log_probs"):  # as in TRL: pickle drops the forward of TRL's head
        loaded.train()
