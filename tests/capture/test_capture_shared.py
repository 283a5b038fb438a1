"""Rows whose documents share tokens, in runs with captured steps: their loss counts a token once per document."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from captured_material import assert_same_run, build
from datasets import Dataset

from fastpack_trl import FastSFTTrainer


def repeated() -> Dataset:
    """Documents that are equal to others, and have nothing else in common: a row needs no keys of another segment."""
    draw = random.Random(0)
    documents = [[draw.randrange(5, 95) for _ in range(20)] for _ in range(3)]
    return Dataset.from_dict({"input_ids": [documents[draw.randrange(3)] for _ in range(80)]})


def test_equal_documents_count_as_often_as_they_are_there(tmp_path: Path, devices: Any) -> None:
    runs = []
    for setting in ("on", "off"):
        made = build(
            FastSFTTrainer, tmp_path / setting, devices, data=repeated(), fast={"share_prefixes": setting},
            max_length=120, per_device_train_batch_size=1, optim="sgd", learning_rate=0.1,
        )  # fmt: skip
        made.train()
        runs.append(made)
    shared, whole = runs
    assert shared.fastpack_report["share_prefixes"].status == "on"
    assert_same_run(shared, whole)
