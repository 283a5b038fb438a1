"""Features that fail, on a model that they cannot read or by a fault of ours: TRL runs, and the warning says why."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from feature_material import without_reasons
from peft import LoraConfig
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.features import FEATURES
from fastpack_trl.features.feature import Feature, Met, Stock
from fastpack_trl.lora.linear import FastLora

pytestmark = pytest.mark.usefixtures("reads_nothing")
READERS = {
    "features.lora.has_lora": "lora",
    "lora.linear.backbones": "lora",
    "features.moe.experts_modules": "moe",
    "features.sync_free.head_of": "sync_free",
    "features.merge_accumulation.is_invoked_once_per_row": "merge_accumulation",
    "features.activation_memory.checkpointable_layers": "activation_memory",
    "model.facts._gaps": "packed_attention",
}
OPTIONS: dict[str, Any] = {"packing": True, "max_steps": 3, "gradient_accumulation_steps": 2}
OPTIONS["trainer"] = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(SFTTrainer, tmp_path_factory.mktemp("stock"), **OPTIONS)


@pytest.mark.parametrize("reader", READERS)
def test_a_part_that_cannot_be_read_is_the_librarys_and_named(
    reader: str, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"fastpack_trl.{reader}", Mock(side_effect=AttributeError("no such field")))
    feature = READERS[reader]
    ours: Any = train(FastSFTTrainer, tmp_path, fast={"activation_memory_gib": 1.0}, **OPTIONS)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    line = ours.fastpack_report[feature]
    assert "cannot be read" in line.reason
    assert "AttributeError: no such field" in line.reason
    if feature == "packed_attention":
        assert ours.fastpack_report["batches"].path == "documents"
    else:
        assert (line.status, line.path) == ("stock", "stock")
        assert "Traceback" in caplog.text
    assert not any(isinstance(module, FastLora) for module in ours.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_a_fault_of_ours_is_shown_with_its_traceback_and_the_run_trains_as_trl_or_stops(
    feature: Feature, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(run: Any) -> Any:
        return run.no_such_field

    without_reasons(monkeypatch, feature.name, concerns=lambda run: True, install=faulty)
    if not feature.falls_back:
        with pytest.raises(AttributeError, match="no_such_field"):
            train(FastSFTTrainer, tmp_path, **OPTIONS)
        return
    ours: Any = train(FastSFTTrainer, tmp_path, **OPTIONS)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    (record,) = [record for record in caplog.records if record.name == "fastpack_trl.features.feature"]
    assert record.levelname == "WARNING"
    assert f"{feature.name}: stock (Qwen3ForCausalLM cannot be read: AttributeError: " in record.getMessage()
    assert "return run.no_such_field" in caplog.text, "the line of the fault, in the traceback"
    line = ours.fastpack_report[feature.name]
    assert (line.status, line.path) == ("stock", "stock")
    assert line.reason in record.getMessage()


@pytest.mark.parametrize("error", [AttributeError, torch.AcceleratorError, torch.OutOfMemoryError])
def test_feature_by_name_and_device_error_stop(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpack_trl.features.moe.experts_modules", Mock(side_effect=error("gone")))
    by_name = error is AttributeError
    said = r"moe='on': Qwen3ForCausalLM cannot be read: .*; set moe='auto' to train" if by_name else "gone"
    with pytest.raises(ValueError if by_name else error, match=said):
        train(FastSFTTrainer, tmp_path, packing=True, fast={"moe": "on" if by_name else "auto"})


@pytest.mark.parametrize("kind", [str, Met, Stock])
def test_processes_decide_together_and_a_reason_of_another_keeps_its_kind(kind: type[str]) -> None:
    """A process that the option does not concern takes part too: a call that it left out would be another's answer."""
    sent: list[str] = []

    def run(told: str = "") -> Any:
        ranks = SimpleNamespace(first_reason=lambda own: sent.append(own()) or sent[-1] or told)
        return SimpleNamespace(ranks=ranks, settings=SimpleNamespace(get=lambda name: "auto"))

    why_not = lambda _: iter([kind("done")])  # noqa: E731
    here = Feature("batched", nullcontext, why_not).why_off(run())
    there = Feature("batched", nullcontext, why_not, concerns=lambda _: False).why_off(run())
    assert (type(here), here, len(sent)) == (kind, "done", 2)
    other = Feature("batched", nullcontext, lambda _: iter(())).why_off(run(f"rank 1: {sent[0]}"))
    assert (type(other), other) == (kind, "rank 1: done")
    assert there == sent[1] != ""
