"""Log-probabilities of the reference that are computed before training: batches by length, files of stock."""

from __future__ import annotations

from hashlib import md5
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, arrow_dataset, fingerprint
from preference_material import assert_same, build, judged, pairs

from fastpack_trl.trainers.reference import ReferencedTrainer, _lengths, length_batches

SHORT = {"max_steps": 2, "eval_steps": 2, "precompute_ref_log_probs": True}
ALONE: dict[str, Any] = {"eval_strategy": "no", "trainer": {"eval_dataset": None}}
COLUMNS = {"DPO": ("ref_chosen_logps", "ref_rejected_logps"), "KTO": ("ref_logps", "ref_KL_logps")}


def named(before: str, transform: Any, arguments: dict[str, Any]) -> str:
    """Name what was done to a data set; by the names of functions, which the tests elsewhere leave to chance."""
    told = {key: getattr(value, "__qualname__", value) for key, value in arguments.items()}
    simple = {key: value for key, value in told.items() if isinstance(value, str | int | list | tuple)}
    return md5(repr((before, str(transform), sorted(simple.items()))).encode()).hexdigest()[:16]


@pytest.mark.parametrize("seed", range(5))
def test_batches_are_by_length_and_none_is_larger_than_stocks_largest(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 500, 200)
    batches = length_batches(lengths, 4)
    assert sorted(chain.from_iterable(batches)) == list(range(200))
    sizes = [lengths[batch].sum() for batch in batches]
    assert max(sizes) <= 4 * lengths.max()
    assert len(batches) < 200 / 4
    in_turn = lengths[list(chain.from_iterable(batches))]
    assert (np.diff(in_turn) <= 0).all()


def test_lengths_are_of_what_the_collator_leaves() -> None:
    data = Dataset.from_dict(
        {"prompt_ids": [[1] * 9, [1]], "chosen_ids": [[1] * 3, [1] * 2], "rejected_ids": [[1], [1] * 50]}
    )
    assert _lengths(data, None).tolist() == [22, 54]
    assert _lengths(data, 11).tolist() == [21, 14]
    assert _lengths(data.select([1, 0]), 11).tolist() == [14, 21]


@pytest.mark.parametrize("name", ["DPO", "KTO"])
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "stock first"])
def test_a_cache_of_one_is_read_by_the_other(
    name: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk, as data sets of users are, and named alike in both runs, as `datasets` names them by what was done."""
    {"DPO": pairs, "KTO": judged}[name]().save_to_disk(str(tmp_path / "data"))
    for module in (arrow_dataset, fingerprint):
        monkeypatch.setattr(module, "update_fingerprint", named)
    calls: list[bool] = []
    by_length = ReferencedTrainer._by_length

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return by_length(self, *args, **kwargs)

    monkeypatch.setattr(ReferencedTrainer, "_by_length", counted)
    made = {}
    for fast in (first, not first):
        data = Dataset.load_from_disk(str(tmp_path / "data"))
        made[fast] = build(name, tmp_path, fast=fast, data=data, lora=False, **SHORT | ALONE)
        if fast is first:
            files = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("cache-*.arrow")}
    assert len(calls) == (1 if first else 0)  # what stock has written is not computed again
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("cache-*.arrow")} == files
    for column in COLUMNS[name]:
        mine, theirs = (np.array(made[fast].train_dataset[column][:]) for fast in (True, False))
        assert (mine == theirs).all()
        assert len(mine) == 20


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_precomputed_in_batches_by_length_logs_and_stores_what_stock_does(name: str, tmp_path: Path) -> None:
    """Of each its own file, since the cached one would be found."""
    made = []
    for fast in (True, False):
        data = {"DPO": pairs, "KTO": judged}[name](24)
        runner = build(
            name, tmp_path / str(fast), fast=fast, data=data, max_length=40, precompute_ref_batch_size=3, **SHORT
        )
        runner.train()
        made.append(runner)
    ours, stock = made
    for column in COLUMNS[name]:
        mine, theirs = (np.array(each.train_dataset[column][:]) for each in made)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert_same(ours, stock)
