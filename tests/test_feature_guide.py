"""The feature of docs/adding-a-feature.md works as it is printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.config import Settings
from fastpack_trl.features import FEATURES, Feature
from fastpack_trl.trainers import featured as wiring

GUIDE = Path(__file__).parents[1] / "docs" / "adding-a-feature.md"


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the feature of the guide, in the list of features."""
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("fastpack_trl.step.deterministic")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, str(GUIDE), "exec"), vars(module))
    monkeypatch.setattr(Settings, "deterministic", "auto", raising=False)
    monkeypatch.setattr(wiring, "FEATURES", (*FEATURES, Feature(module.deterministic, "any")))
    return module.deterministic


def test_the_feature_of_the_guide_trains_as_stock_and_leaves_nothing(tmp_path: Path, deterministic: Any) -> None:
    seen = []
    options: dict[str, Any] = {"packing": True, "max_steps": 3}
    stock = train(SFTTrainer, tmp_path / "stock", **options)

    class Watched(FastSFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().training_step(*args, **kwargs)

    ours = train(Watched, tmp_path / "ours", **options)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    line = ours.fastpack_report[deterministic.__name__]
    assert (line.status, line.path, line.reason) == ("on", "torch", "on cpu; slower")
    assert seen == [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()
