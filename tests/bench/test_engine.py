"""`fastpack_trl.bench.engine`: one training that is watched, and sides that are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.bench.engine import compare_sides, run_side, turn_order
from fastpack_trl.bench.gate import LossParityError
from fastpack_trl.bench.watch import SideResult, Watch
from fastpack_trl.errors import UserError
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.testing import tiny_model

CLASSES: dict[str, tuple[Any, Any]] = {
    "stock": (SFTTrainer, SFTConfig),
    "fastpack": (FastSFTTrainer, FastSFTConfig),
}


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


def _run(folder: Path, side: str, watch: dict[str, Any] | None = None, **more: Any) -> SideResult:
    watched = Watch(**{"warmup": 2, "timed": 2, "gate": 2, **(watch or {})})
    return run_side(partial(_trainer, folder, side, **more), watched)


def test_a_watch_records_each_step_as_the_log_has_it_and_ends_the_run(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "stock", logging_steps=1)
    own = dict(vars(trainer))
    asked: list[int] = []
    watch = Watch(
        warmup=2, timed=3, settling=1, settled=lambda trainer: asked.append(1) or len(asked) > 2, profiled=1,
        trace=tmp_path / "trace.json", count_syncs=True,
    )  # fmt: skip
    with watch.attached(trainer):
        trainer.train()
    found = watch.result
    assert trainer.state.global_step == 4 + 3 + 1 + 1  # settled in step 3, and one step more
    assert (found.warmup_steps, len(found.seconds)) == (4, 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for figures, name in ((found.losses, "loss"), (found.grad_norms, "grad_norm")):
        assert figures[:7] == pytest.approx([entry[name] for entry in logs[:7]], rel=1e-5)
    assert found.tokens == logs[6]["num_tokens"] - logs[3]["num_tokens"] > 0
    assert 0 < found.first_step_seconds < found.warmup_seconds
    assert found.profile["kernels"] == 0  # on the CPU
    assert found.host_syncs > 0
    assert "traceEvents" in (tmp_path / "trace.json").read_text()
    assert found.peak_gib is found.reserved_gib is None
    assert {name: value for name, value in vars(trainer).items() if name in own}.keys() == own.keys()
    assert SideResult(**json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("change", [{"timed": 0}, {"warmup": 1, "gate": 2}, {"warmup": -1}])
def test_a_watch_refuses_steps_that_cannot_be(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="give timed >= 1"):
        Watch(**change)


def test_sides_are_compared_after_their_losses(tmp_path: Path) -> None:
    runs = {side: partial(_run, tmp_path, side) for side in CLASSES}
    found = compare_sides(runs, subject="fastpack", progress=False)
    assert found["complete"]
    assert found["order"] == ["stock", "fastpack", "fastpack", "stock"]
    stock, ours = found["sides"].values()
    assert len(stock["seconds"]["values"]) == 4  # of two rounds
    assert stock["seconds"]["q1"] <= stock["seconds"]["median"] <= stock["seconds"]["q3"]
    assert found["ratios"] == {
        "stock": {
            "median": pytest.approx(stock["seconds"]["median"] / ours["seconds"]["median"]),
            "rounds": found["ratios"]["stock"]["rounds"],
        }
    }
    assert len(found["ratios"]["stock"]["rounds"]) == 2
    assert stock["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert ours["tokens_per_second"] > 0
    assert "packed_attention" in ours["path"]
    assert [set(step) for step in found["gate"]["steps"]] == [{"stock", "fastpack"}] * 2
    differences = [abs(a - b) / b for a, b in zip(ours["losses"][2:], stock["losses"][2:], strict=True)]
    assert found["loss_difference"] == max(differences) > 0
    assert max(differences) < 1e-5
    assert json.loads(json.dumps(found)) == found


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
        (
            {"data": make_dataset("text").shuffle(1)},
            LossParityError,
            "stock and fastpack were given different tokens in step 1",
        ),
        ({"change": _breaks}, UserError, "fastpack cannot be trained: RuntimeError: no kernel"),
        ({"change": lambda trainer: trainer.add_callback(_Stops())}, UserError, "ended by itself after 1 step"),
    ],
)
def test_nothing_is_compared_if_our_side_differs_or_fails(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    runs = {"stock": partial(_run, tmp_path, "stock"), "fastpack": partial(_run, tmp_path, "fastpack", **more)}
    with pytest.raises(error, match=message):
        compare_sides(runs, subject="fastpack", progress=False)


@pytest.mark.parametrize(("change", "reason"), [(_other_model, "the loss of step 1"), (_breaks, "no kernel")])
def test_another_baseline_that_differs_or_fails_is_left_out_with_the_reason(
    tmp_path: Path, change: Any, reason: str
) -> None:
    runs = {
        "stock": partial(_run, tmp_path, "stock"),
        "tuned": partial(_run, tmp_path, "stock", change=change),
        "fastpack": partial(_run, tmp_path, "fastpack"),
    }
    found = compare_sides(runs, subject="fastpack", rounds=1, progress=False)
    assert reason in found["sides"]["tuned"]["failed"]
    assert set(found["ratios"]) == {"stock"}


def test_a_side_without_memory_is_named_and_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupted() -> SideResult:
        raise KeyboardInterrupt

    runs = {"stock": partial(_run, tmp_path, "stock"), "fastpack": partial(_run, tmp_path, "fastpack")}
    small = partial(_run, tmp_path, "stock", change=_out_of_memory)
    found = compare_sides({**runs, "stock": small}, subject="fastpack", rounds=1, progress=False)
    assert "OutOfMemoryError" in found["sides"]["stock"]["failed"]
    assert not found["ratios"]
    found = compare_sides({**runs, "fastpack": interrupted}, subject="fastpack", progress=False)
    assert not found["complete"]
    assert set(found["sides"]) == {"stock"}
    with pytest.raises(UserError, match="no side could be measured"):
        compare_sides({"stock": small, "fastpack": small}, subject="fastpack", progress=False)


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd"])
def test_every_side_comes_first_and_last_in_its_turn(names: str) -> None:
    turns = [turn_order(list(names), index) for index in range(2 * len(names))]
    assert all(sorted(turn) == list(names) for turn in turns)
    assert {turn[0] for turn in turns} == {turn[-1] for turn in turns} == set(names)
