"""Log-probabilities of the reference that are computed before training: on rows, in files that stock reads too."""

from __future__ import annotations

from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, arrow_dataset, fingerprint
from preference_material import build, judged, pairs

SHORT = {"max_steps": 2, "eval_steps": 2, "precompute_ref_log_probs": True}
ALONE: dict[str, Any] = {"eval_strategy": "no", "trainer": {"eval_dataset": None}}
COLUMNS = {"DPO": ("ref_chosen_logps", "ref_rejected_logps"), "KTO": ("ref_logps", "ref_KL_logps")}


def named(before: str, transform: Any, arguments: dict[str, Any]) -> str:
    """Name what was done to a data set; by the names of functions, which the tests elsewhere leave to chance."""
    told = {key: getattr(value, "__qualname__", value) for key, value in arguments.items()}
    simple = {key: value for key, value in told.items() if isinstance(value, str | int | list | tuple)}
    return md5(repr((before, str(transform), sorted(simple.items()))).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", ["DPO", "KTO"])
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "stock first"])
def test_the_other_trainer_reads_the_cache_of_the_first(
    name: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk, as data sets of users are, and named alike in both runs, as `datasets` names them by what was done."""
    {"DPO": pairs, "KTO": judged}[name]().save_to_disk(str(tmp_path / "data"))
    for module in (arrow_dataset, fingerprint):
        monkeypatch.setattr(module, "update_fingerprint", named)
    made = {}
    for fast in (first, not first):
        data = Dataset.load_from_disk(str(tmp_path / "data"))
        made[fast] = build(name, tmp_path, fast=fast, data=data, lora=False, **SHORT | ALONE)
        if fast is first:
            files = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("cache-*.arrow")}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("cache-*.arrow")} == files
    for column in COLUMNS[name]:
        mine, theirs = (np.array(made[fast].train_dataset[column][:]) for fast in (True, False))
        assert (mine == theirs).all()
        assert len(mine) == 20
