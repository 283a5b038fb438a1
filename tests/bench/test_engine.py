"""`run_side` and `compare_sides`: one training that is watched, and sides that are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.bench.compare import LossParityError, check_losses, compare_sides, quartiles, tolerance
from fastpack_trl.bench.watch import (
    GRADIENT_NORM,
    LOSS,
    SideResult,
    Watch,
    covered,
    is_warmed_up,
    run_side,
    without_dropout,
)
from fastpack_trl.errors import UserError
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.testing import tiny_model

CLASSES: dict[str, tuple[Any, Any]] = {"stock": (SFTTrainer, SFTConfig), "fastpack": (FastSFTTrainer, FastSFTConfig)}


def _trainer(
    folder: Path, side: str, data: Any = None, change: Callable[[Any], None] = lambda trainer: None, **more: Any
) -> Any:
    own = settings(folder, packing=True, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    own |= {"max_steps": LONG_RUN, "eval_strategy": "no", "logging_steps": 3} | more
    del own["eval_steps"]
    trainer_class, config_class = CLASSES[side]
    trainer = trainer_class(
        tiny_model("qwen3"), args=config_class(**own), train_dataset=data or make_dataset("text"),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    change(trainer)
    return trainer


def _run(folder: Path, side: str, **more: Any) -> SideResult:
    return run_side(partial(_trainer, folder, side, **more), Watch(warmup=2, timed=2, gate=2))


def test_a_watch_records_each_step_as_the_log_has_it_and_ends_the_run(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "fastpack", logging_steps=1)
    attributes, waiting = set(vars(trainer)), [True] * 2
    watch = Watch(warmup=2, timed=3, settling=1, profiled=1, trace=tmp_path / "trace.json", count_syncs=True)
    with watch.attached(trainer), trainer.fastpack_run.step.waiting_for(lambda: bool(waiting and waiting.pop())):
        trainer.train()
    found = watch.result
    assert trainer.state.global_step == 4 + 3 + 1 + 1  # warmed up in step 3, and one step more
    assert (found.warmup_steps, len(found.seconds)) == (4, 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for figures, name in ((found.losses, "loss"), (found.grad_norms, "grad_norm")):
        assert figures[:7] == pytest.approx([entry[name] for entry in logs[:7]], rel=1e-5)
    assert found.tokens == logs[6]["num_tokens"] - logs[3]["num_tokens"] > 0
    assert 0 < found.first_step_seconds < found.warmup_seconds
    assert found.profile["launches"] == found.host_syncs == 0  # on the CPU, and of our trainer
    assert "traceEvents" in (tmp_path / "trace.json").read_text()
    assert found.peak_gib is found.reserved_gib is None
    assert set(vars(trainer)) & attributes == attributes
    assert watch not in trainer.callback_handler.callbacks
    assert is_warmed_up(trainer)
    assert SideResult(**json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("change", [{"timed": 0}, {"warmup": 1, "gate": 2}, {"warmup": -1}])
def test_a_watch_refuses_steps_that_cannot_be(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="give timed >= 1"):
        Watch(**change)


def _other_model(trainer: Any) -> None:
    trainer.model.model.norm.register_forward_hook(lambda _module, _inputs, hidden: hidden * 1.01)


def _out_of_memory(trainer: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _breaks(trainer: Any) -> None:
    raise RuntimeError("no kernel")


class _Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"change": _other_model}, LossParityError, "the loss of step 1 is .* with fastpack and .* with stock"),
        ({"data": make_dataset("text").shuffle(1)}, LossParityError, "fastpack were given different tokens in step 1"),
        ({"change": _breaks}, UserError, "fastpack cannot be trained: RuntimeError: no kernel"),
        ({"change": lambda trainer: trainer.add_callback(_Stops())}, UserError, "ended by itself after 1 step"),
    ],
)
def test_nothing_is_compared_if_our_side_differs_or_fails(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    runs = {"stock": partial(_run, tmp_path, "stock"), "fastpack": partial(_run, tmp_path, "fastpack", **more)}
    with pytest.raises(error, match=message):
        compare_sides(runs, progress=False)


def test_other_baselines_that_differ_or_fail_are_left_out_with_the_reason(tmp_path: Path) -> None:
    others = {"other": (_other_model, "the loss of step 1"), "broken": (_breaks, "RuntimeError: no kernel")}
    runs = {name: partial(_run, tmp_path, "stock", change=change) for name, (change, _) in others.items()}
    runs = {"stock": partial(_run, tmp_path, "stock"), **runs, "fastpack": partial(_run, tmp_path, "fastpack")}
    found = compare_sides(runs, rounds=1, progress=False)
    for name, (_, reason) in others.items():
        assert found["sides"][name]["failed"].startswith(reason)
    assert set(found["ratios"]) == {"stock"}


def test_a_side_without_memory_is_named_and_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupted() -> SideResult:
        raise KeyboardInterrupt

    runs = {"stock": partial(_run, tmp_path, "stock"), "fastpack": partial(_run, tmp_path, "fastpack")}
    small = partial(_run, tmp_path, "stock", change=_out_of_memory)
    found = compare_sides({**runs, "stock": small}, rounds=1, progress=False)
    assert "OutOfMemoryError" in found["sides"]["stock"]["failed"]
    assert not found["ratios"]
    found = compare_sides({**runs, "fastpack": interrupted}, progress=False)
    assert not found["complete"]
    assert set(found["sides"]) == {"stock"}
    with pytest.raises(UserError, match="no side could be measured"):
        compare_sides({"stock": small, "fastpack": small}, progress=False)


@pytest.mark.parametrize(
    ("dtype", "apart", "passes"),
    [
        ("float32", 0.9e-5, True), ("float32", 2e-5, False), ("bfloat16", 0.007, True), ("bfloat16", 0.009, False),
        ("float16", 0.002, False), ("float32", float("nan"), False),
    ],
)  # fmt: skip
def test_the_tolerance_is_that_of_the_dtype(dtype: str, apart: float, passes: bool) -> None:
    for figure, more in ((LOSS, 1), (GRADIENT_NORM, 10)):
        values = [[4.0], [4.0 * (1 + more * apart)]]
        first, own = (
            SideResult(digests=[1], losses=value, grad_norms=list(value), dtype=dtype, compares=figure)
            for value in values
        )
        if passes:
            check_losses("stock", first, "fastpack", own)
            continue
        message = f"the {figure} of step 1 .* allowed are {tolerance(dtype, figure):.0e}"
        with pytest.raises(LossParityError, match=message):
            check_losses("stock", first, "fastpack", own)


def test_dropout_is_off_inside_and_back_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Dropout(0.0))
    model[0].attention_dropout = 0.1
    with without_dropout(model):
        assert (model[1].p, model[0].attention_dropout) == (0.0, 0.0)
    assert (model[1].p, model[2].p, model[0].attention_dropout) == (0.3, 0.0, 0.1)


def test_quartiles_are_between_the_values_and_one_value_is_all_three() -> None:
    assert quartiles([3, 1, 2]) == {"median": 2, "q1": 1.5, "q3": 2.5, "values": [3, 1, 2]}
    assert quartiles([4.0])["q1"] == quartiles([4.0])["q3"] == 4.0


def test_a_moment_in_which_several_kernels_run_counts_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0
