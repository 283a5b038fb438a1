"""A run that resumes with another data set says so, once; one that resumes with its own says nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_material import figures, make_dataset, sentences, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.callbacks.resumed_data import CHANGED, KEY
from fastpack_trl.packing.dataset import rows_digest


def _train(cls: Any, folder: Path, data: Any, resume: str = "", **more: Any) -> Any:
    options = {"packing": True, "eval_strategy": "no", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    return train(cls, folder, data=data, resume=resume, **options | more)


def _losses(trainer: Any) -> list[float]:
    losses = [row["loss"] for row in figures(trainer) if "loss" in row]
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("packing", [True, False])
def test_another_data_set_is_noticed_on_resume(packing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, other = make_dataset("text"), make_dataset("text", seed=5)
    whole = _train(FastSFTTrainer, tmp_path, data, packing=packing)
    caplog.set_level(logging.WARNING)
    for given, said in ((data, 0), (other, 1), (data.select(range(len(data) - 1, -1, -1)), 1)):
        caplog.clear()
        resumed = _train(FastSFTTrainer, tmp_path, given, "checkpoint-2", packing=packing)
        assert caplog.text.count(CHANGED) == said
        assert (_losses(resumed) == _losses(whole)) == (not said)
    # A checkpoint of stock's has no digest, and stock asks for none.
    caplog.clear()
    _train(SFTTrainer, tmp_path / "stock", data, packing=packing)
    _train(FastSFTTrainer, tmp_path / "stock", other, "checkpoint-2", packing=packing, save_strategy="no")
    _train(SFTTrainer, tmp_path, data, "checkpoint-2", packing=packing, restore_callback_states_from_checkpoint=True)
    assert CHANGED not in caplog.text
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    assert set(state["stateful_callbacks"]) >= {"TrainerControl"}
    assert KEY in state["stateful_callbacks"]
    off = {"max_steps": 1, "save_steps": 1, "packing": False, "fast": {"save_report": False}}
    _train(FastSFTTrainer, tmp_path / "off", data, **off)
    assert KEY not in (tmp_path / "off" / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8")


def test_streamed_data_resumes_exactly_and_without_a_digest(tmp_path: Path) -> None:
    streamed = Dataset.from_dict({"text": sentences(200, 3)}).to_iterable_dataset(num_shards=2)
    for packing in (True, False):
        for data in (streamed, streamed.shuffle(seed=1, buffer_size=30)):
            whole = _train(FastSFTTrainer, tmp_path, data, packing=packing)
            resumed = _train(FastSFTTrainer, tmp_path, data, "checkpoint-2", packing=packing)
            assert _losses(resumed) == _losses(whole)
    text = (tmp_path / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8")
    assert KEY not in json.loads(text)["stateful_callbacks"]


def test_the_digest_is_of_the_rows_in_their_order() -> None:
    rows = {"input_ids": [[1, 2, 3], [4]], "seq_lengths": [[2, 1], [1]]}
    digest = rows_digest(Dataset.from_dict(rows))
    for other in ({"input_ids": [[4], [1, 2, 3]]}, {"input_ids": [[1, 2, 9], [4]]}, {"seq_lengths": [[1, 2], [1]]}):
        assert digest != rows_digest(Dataset.from_dict(rows | other))
    filtered = Dataset.from_dict({"input_ids": [[0], *rows["input_ids"]], "seq_lengths": [[1], *rows["seq_lengths"]]})
    assert digest == rows_digest(filtered.select([1, 2]))
    many = [[index] * (index % 3 + 1) for index in range(100)]
    assert rows_digest(Dataset.from_dict({"input_ids": many})) != rows_digest(
        Dataset.from_dict({"input_ids": many[3:]})
    )
