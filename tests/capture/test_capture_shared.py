"""Rows whose documents share tokens, in runs with captured steps: their loss counts a token once per document."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from captured_material import assert_same_run, train
from datasets import Dataset

SHARED: dict[str, Any] = {
    "max_length": 120, "per_device_train_batch_size": 1, "optim": "sgd", "learning_rate": 0.1, "max_steps": 12,
}  # fmt: skip


def repeated() -> Dataset:
    """Documents that are equal to others, and have nothing else in common: a row needs no keys of another segment."""
    draw = random.Random(0)
    documents = [[draw.randrange(5, 95) for _ in range(20)] for _ in range(3)]
    return Dataset.from_dict({"input_ids": [documents[draw.randrange(3)] for _ in range(80)]})


def prefixed(alone: float = 0.0) -> Dataset:
    """Documents that begin with one of two prompts, but for a share of them."""
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 95) for _ in range(length)] for length in (24, 18)]

    def document() -> list[int]:
        own = [draw.randrange(5, 95) for _ in range(draw.randrange(4, 30))]
        return own if draw.random() < alone else draw.choice(prompts) + own

    return Dataset.from_dict({"input_ids": [document() for _ in range(120)]})


def assert_captured(folder: Path, devices: Any, **options: Any) -> Any:
    """A captured run with prefixes once, beside an eager one with each document whole."""
    fast, sides = options.pop("fast", {}), []
    for setting in ("on", "off"):
        both = {"cuda_graph": setting, "share_prefixes": setting}
        sides.append(train(folder / setting, devices, **SHARED | options, fast=fast | both))
    shared, whole = sides
    assert shared.fastpack_report["share_prefixes"].status == "on"
    found = shared.fastpack_report["cuda_graph"]
    assert found.path == "captured", found
    assert devices.made[0].log.count("replay") >= 4
    assert_same_run(shared, whole)
    return shared


def test_equal_documents_count_as_often_as_they_are_there(tmp_path: Path, devices: Any) -> None:
    assert_captured(tmp_path, devices, data=repeated())


@pytest.mark.parametrize(
    "options",
    [
        {"data": prefixed()},
        {"data": prefixed(alone=0.7)},
        {"data": prefixed(), "gradient_accumulation_steps": 3, "fast": {"merge_accumulation": "on"}},
        {"data": prefixed(), "loss_type": "dft"},
        {"data": prefixed(), "family": "qwen3_moe"},
    ],
    ids=["full", "some rows share nothing", "merged", "dft", "experts"],
)
def test_rows_with_shared_prefixes_are_replayed(options: dict[str, Any], tmp_path: Path, devices: Any) -> None:
    assert_captured(tmp_path, devices, **options)
