"""A run that resumes has the losses of the run that was not interrupted, with data sets and with streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_material import figures, make_dataset, sentences, train

from fastpack_trl import FastSFTTrainer


def _losses(folder: Path, data: Any, resume: str = "", **more: Any) -> list[float]:
    options = {"eval_strategy": "no", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = train(FastSFTTrainer, folder, data=data, resume=resume, **options | more)
    losses = [row["loss"] for row in figures(trainer) if "loss" in row]
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["data set", "stream", "shuffled stream"])
def test_a_resumed_run_has_the_losses_of_the_whole_run(kind: str, packing: bool, tmp_path: Path) -> None:
    data: Any = make_dataset("text")
    if kind != "data set":
        data = Dataset.from_dict({"text": sentences(200, 3)}).to_iterable_dataset(num_shards=2)
        data = data.shuffle(seed=1, buffer_size=30) if kind == "shuffled stream" else data
    whole = _losses(tmp_path, data, packing=packing)
    assert _losses(tmp_path, data, "checkpoint-2", packing=packing) == whole
