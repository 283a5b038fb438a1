"""An out-of-memory anywhere in a run of SFT on one process: the run goes on with the figures of one that had none."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import CAPTURED, capturing
from out_of_memory import InBackward
from torch import Tensor, nn
from trainer_material import Halves, assert_same_log, build, callback, figures, make_dataset, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.step import loss as losses
from fastpack_trl.testing import tiny_model

OPTIONS: dict[str, Any] = {
    "packing": True, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "max_steps": 4,
    "gradient_accumulation_steps": 3, "eval_steps": 2, "logging_steps": 1, "gradient_checkpointing": False,
}  # fmt: skip


class Full:
    """Raises as a full device does, in the calls of the given numbers, of those that are made in one mode."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.calls, self.raised = numbers, 0, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls in self.numbers:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def model_that_fills(full: Full, place: str) -> nn.Module:
    """A model with dropout, so that random numbers count, whose second layer is where the device is full."""
    model = tiny_model("qwen3", attention_dropout=0.1, attn_implementation="eager")
    layer = model.model.layers[1]

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and layer.training
        if trains and place == "forward":
            full()
        if not layer.training and place == "evaluation":
            full()
        hidden = InBackward.apply(hidden, full) if trains and place == "backward" else hidden
        return type(layer).forward(layer, hidden, *args, **kwargs)

    layer.forward = forward
    return model


Run = tuple[Any, list[list[int]]]
"""A trainer after `train`, and the random state at the end of each step."""


def noting(states: list[list[int]]) -> dict[str, Any]:
    return {"callbacks": [callback("on_step_end", lambda *_: states.append(torch.get_rng_state().tolist()))()]}


def run(cls: type[SFTTrainer], folder: Path, full: Full, place: str) -> Run:
    states: list[list[int]] = []
    fast = {"verify_packing": "off", "packed_attention": "off"} if issubclass(cls, FastSFTTrainer) else None
    return train(cls, folder, model=model_that_fills(full, place), fast=fast, trainer=noting(states), **OPTIONS), states


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(SFTTrainer, tmp_path_factory.mktemp("stock"), Full(), "forward")


@pytest.mark.parametrize(
    ("place", "number"),
    [("forward", 1), ("backward", 1), ("forward", 6), ("backward", 8), ("backward", 9), ("evaluation", 2)],
)
def test_a_run_goes_on_with_the_figures_of_stock(
    place: str, number: int, stock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Full(number)
    with caplog.at_level(logging.WARNING):
        ours, states = run(FastSFTTrainer, tmp_path, full, place)
    assert full.raised == 1
    expected = stock[0]
    assert_same_log(ours, expected)
    assert states == stock[1]
    assert sum("ran out of memory" in text for text in caplog.messages) == 1
    torch.testing.assert_close(ours.model.state_dict(), expected.model.state_dict())


CAPTURES = OPTIONS | {"max_steps": 8, "eval_strategy": "no"}
"""Three rows a step; the graphs of forward and backward are recorded after a few steps."""


@pytest.fixture(scope="module")
def uncaptured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    states: list[list[int]] = []
    folder, model = tmp_path_factory.mktemp("uncaptured"), tiny_model("qwen3")
    return train(SFTTrainer, folder, model=model, trainer=noting(states), **CAPTURES), states


@pytest.mark.parametrize(
    ("place", "number"),
    # Odd ones are forward passes, even ones backward passes, which have added to the gradients by then.
    [("recording", 1), ("recording", 2), ("replay", 1), ("replay", 2), ("replay", 7), ("replay", 10)],
)
def test_a_captured_run_goes_on_without_graphs_and_with_the_figures_of_stock(
    place: str, number: int, uncaptured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full, states = Full(number), list[list[int]]()
    fast = CAPTURED | {"merge_accumulation": "off", "verify_packing": "off"}
    with capturing() as devices, caplog.at_level(logging.WARNING):
        if place == "recording":
            error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            devices.options["fail"] = lambda made: error if made == number else None
        else:
            devices.options["after_replay"] = full
        model = devices.options["model"] = tiny_model("qwen3")
        ours = train(FastSFTTrainer, tmp_path, model=model, fast=fast, trainer=noting(states), **CAPTURES)
    (device,) = devices.made
    assert device.log.count("replay") == (number if place == "replay" else 0)
    assert full.raised == (place == "replay")
    expected = uncaptured[0]
    assert_same_log(ours, expected, rtol=2e-5, atol=2e-5)
    assert states == uncaptured[1]
    torch.testing.assert_close(ours.model.state_dict(), expected.model.state_dict(), rtol=1e-3, atol=2e-4)
    line = ours.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("off", "eager"), line
    assert ("no memory for a graph" if place == "recording" else "a step ran out of memory") in line.reason
    assert sum("cuda_graph: eager from here on" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("number", [1, 5])
def test_our_rows_run_again_with_their_metrics(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head runs out of memory, in the first micro-batch and in the middle of a step; metrics are deferred."""
    options = OPTIONS | {"logging_steps": 2}
    fast = {"merge_accumulation": "off"}
    expected = train(FastSFTTrainer, tmp_path / "a", model=tiny_model("qwen3"), fast=fast, **options)
    full, head = Full(number), losses.head_loss

    def filling(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            full()
        return head(*args, **kwargs)

    monkeypatch.setattr(losses, "head_loss", filling)
    ours = train(FastSFTTrainer, tmp_path / "b", model=tiny_model("qwen3"), fast=fast, **options)
    assert full.raised == 1
    assert figures(ours) == figures(expected)


def test_smaller_auto_find_batch_size_has_its_own_second_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch size fails twice in a step, the next one once."""
    numbers, sizes, head = count(1), [], losses.head_loss

    def filling(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and next(numbers) in (1, 2, 4):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return head(*args, **kwargs)

    class Sizes(FastSFTTrainer):
        def get_train_dataloader(self) -> Any:
            sizes.append(self._train_batch_size)
            return super().get_train_dataloader()

    monkeypatch.setattr(losses, "head_loss", filling)
    options = {"packing": True, "max_steps": 2, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
    fast = {"merge_accumulation": "off"}
    trainer = train(Sizes, tmp_path, model=tiny_model("qwen3"), fast=fast, auto_find_batch_size=True, **options)
    assert (sizes, trainer.state.global_step) == ([4, 3], 2)


@pytest.mark.parametrize("training", [True, False])
def test_metrics_of_a_batch_that_failed_after_its_loss_count_once(training: bool, tmp_path: Path, stock: Any) -> None:
    full = Full(5 if training else 2)

    class Fills(FastSFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training is training:
                full()
            return loss

    ours, _ = run(Fills, tmp_path, Full(), "forward")
    assert full.raised == 1
    assert_same_log(ours, stock[0])


def test_an_optimizer_step_is_not_applied_twice(tmp_path: Path) -> None:
    """Part of it may have been applied: the error is the device's."""
    full, applied = Full(2), []

    class Filling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            applied.append(1)
            full()

    model = tiny_model("qwen3")
    optimizer = Filling(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = build(FastSFTTrainer, tmp_path, model=model, trainer={"optimizers": (optimizer, schedule)}, **OPTIONS)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    assert len(applied) == 2


def test_without_end_the_error_is_the_devices(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run(FastSFTTrainer, tmp_path, Full(*range(1, 100)), "backward")


class Reads(FastSFTTrainer):
    """Reads metrics in each micro-batch: they are in TRL's lists together with those of the steps before it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        assert self._metrics["train"]["entropy"]
        return loss


@pytest.mark.parametrize(
    ("why", "number"),
    [
        ("metrics of the step", 8),
        ("on_substep_end of Halves", 2),
        ("a hook on the gradient of", 2),  # weights may be stepped in the backward pass
        ("gradients of micro-batches before it are still there", 6),  # a stream whose epoch ended within a step
    ],
)
def test_a_step_that_cannot_be_taken_back_is_not_run_again(why: str, number: int, tmp_path: Path) -> None:
    model: Any = model_that_fills(Full(number), "backward")
    fast = {"merge_accumulation": "off", "verify_packing": "off"}
    options = OPTIONS | {"logging_steps": 4, "eval_strategy": "no", "model": model, "fast": fast}
    cls = Reads if "metrics" in why else FastSFTTrainer
    if "hook" in why:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: None)
    elif "before" in why:
        data = make_dataset("text", 5).to_iterable_dataset()
        options |= {"packing": False, "gradient_accumulation_steps": 2, "data": data}
    trainer = build(cls, tmp_path, trainer={"callbacks": [Halves()] if "Halves" in why else []}, **options)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    (note,) = error.value.__notes__
    assert why in note
    assert "lower " in note
    assert "\n" not in note
