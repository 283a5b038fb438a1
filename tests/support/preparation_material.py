"""A data set as stock and ours prepare it, by one trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_material import make_dataset, make_tokenizer, settings
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model


def make_trainer(folder: Path) -> FastSFTTrainer:
    args = SFTConfig(**settings(folder, eval_strategy="no"))
    rows = make_dataset("text", 8)
    return FastSFTTrainer(tiny_model("qwen3"), args=args, processing_class=make_tokenizer(), train_dataset=rows)


def prepared(trainer: Any, rows: Any, *, tokenizer: Any = None, packing: bool = False, formatting: Any = None,
             stock: bool = False, **changes: Any) -> Dataset:  # fmt: skip
    """What the trainer, or stock by the same trainer, makes of a data set."""
    args = copy.copy(trainer.args)
    only = changes.pop("completion_only_loss", True)
    for name, value in changes.items():
        setattr(args, name, value)
    tokenizer = trainer.processing_class if tokenizer is None else tokenizer
    given = (rows, tokenizer, args, packing, formatting, "train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "completion_only_loss", only)
        patch.setattr(trainer, "_tokenizer", tokenizer)
        patch.setattr(trainer.fastpack_run, "facts", None)
        done = SFTTrainer._prepare_dataset(trainer, *given) if stock else trainer._prepare_dataset(*given)
        trainer.seen = trainer.fastpack_run.facts
    assert isinstance(done, Dataset)
    return done


def assert_equal(ours: Dataset, stock: Dataset) -> None:
    assert ours.features == stock.features
    assert ours.column_names == stock.column_names
    assert len(ours) == len(stock) > 0
    assert ours.with_format("arrow")[:].equals(stock.with_format("arrow")[:])
