"""Streams with fewer micro-batches than an optimizer step needs: a run that would go on for ever stops, no other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from trainer_material import make_dataset, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.errors import UserError


class Epochs(TrainerCallback):
    """Counts epochs, and ends a run after so many."""

    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1
        control.should_training_stop |= self.count >= self.most


def run(cls: Any, folder: Path, data: Any, epochs: Epochs, **more: Any) -> Any:
    args = {"packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, **more}
    return train(cls, folder, data=data, trainer={"callbacks": [epochs]}, eval_strategy="no", **args)


def stream(count: int = 20) -> IterableDataset:
    return make_dataset("text", count).to_iterable_dataset()


@pytest.mark.parametrize("packing", [True, False])
def test_data_that_never_makes_a_step_stops_the_run(packing: bool, tmp_path: Path) -> None:
    epochs = Epochs(6)
    assert run(SFTTrainer, tmp_path, stream(8), epochs, packing=packing).state.global_step == 0
    assert epochs.count == 6  # and so on, without the callback
    epochs = Epochs(6)
    with pytest.raises(UserError, match=r"gradient_accumulation_steps=8: no step is made; set .*=\d,") as error:
        run(FastSFTTrainer, tmp_path, stream(8), epochs, packing=packing)
    assert epochs.count == 2
    remedy = int(str(error.value).partition("; set gradient_accumulation_steps=")[2][0])
    done = run(FastSFTTrainer, tmp_path, stream(8), Epochs(6), packing=packing, gradient_accumulation_steps=remedy)
    assert done.state.global_step == 4


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_epochs_that_end_between_two_steps_go_on(steps: int, tmp_path: Path) -> None:
    ours, stock = (
        run(cls, tmp_path, stream(), Epochs(6), gradient_accumulation_steps=steps)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert ours.state.global_step == stock.state.global_step == 4


def test_data_that_once_is_enough_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that differ from epoch to epoch may be more in the next: said, not stopped."""
    source: Dataset = make_dataset("text", 60)
    epoch = iter(range(100))

    def rows() -> Any:
        number = next(epoch)
        yield from (source[index] for index in range(number, number + 8 * (number + 1) // 2))

    with caplog.at_level(logging.WARNING, logger="fastpack_trl"):
        trainer = run(FastSFTTrainer, tmp_path, IterableDataset.from_generator(rows), Epochs(12), max_steps=1)
    assert trainer.state.global_step == 1
    assert sum("no step is made" in text for text in caplog.messages) == 1
