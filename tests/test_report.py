"""The report: its banner of 80 columns, the whole on request, beside checkpoints and in the model card."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trainer_material import train

import fastpack_trl
from fastpack_trl import FastSFTTrainer
from fastpack_trl._version import REPOSITORY
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.report import FeatureReport
from fastpack_trl.testing import tiny_model


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> FeatureReport:
    monkeypatch.delenv("FASTPACK_VERBOSE", raising=False)
    made = FeatureReport()
    made.add(
        "layer_compile", "off", "eager", "on cpu compiling takes longer than most runs; layer_compile='on' compiles"
    )
    made.add("packed_attention", "on", "per_document", "cpu; plain causal; varlen needs CUDA, the model is on cpu")
    made.add("moe", "stock", "stock", "experts_implementation='batched_mm' was chosen " + "x" * 90)
    made.add("cuda_graph", "off", "eager", "the model is on cpu")
    made.add("a feature with a very long name, longer than half a line", "on", "fast", "because " * 20)
    made.facts["truncated tokens"] = (
        "1,218 tokens (53.0%) of 14 documents cut by max_length=64; max_length=229 keeps them"
    )
    return made


def test_the_banner_has_80_columns_on_first_and_what_is_off_by_name(report: FeatureReport) -> None:
    lines = report.banner().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"fastpack-trl {fastpack_trl.__version__}"
    states = [line.split()[0] for line in lines[1:] if line[:1] in "os" and line[:7].strip() in ("on", "stock", "off")]
    assert states == ["on", "on", "stock", "off"]
    assert "off    layer_compile, cuda_graph (why: --verbose or FASTPACK_VERBOSE=1)" in lines
    assert "compiling takes longer" not in report.banner()


def test_the_whole_report_has_every_reason(report: FeatureReport, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(report)
    assert max(map(len, whole.splitlines())) <= 80
    for line in report:
        assert line.feature in " ".join(whole.split())
        assert line.reason.split()[0] in whole
    monkeypatch.setenv("FASTPACK_VERBOSE", "1")
    assert report.banner() == whole
    monkeypatch.delenv("FASTPACK_VERBOSE")
    off = FeatureReport()
    off.add("packed_attention", "off", "stock", "packing is off")
    assert "packing is off" in off.banner(), "if all of it is off, the reasons are what is left to say"


def test_packed_attention_says_its_path() -> None:
    with packed_attention(tiny_model("qwen3"), "per_document") as attention:
        assert repr(attention).startswith("PackedAttention(path='per_document', reason='")


@pytest.mark.parametrize("name", fastpack_trl.__all__)
def test_no_public_signature_has_a_private_parameter(name: str) -> None:
    value = getattr(fastpack_trl, name)
    if not callable(value):
        return
    private = [parameter for parameter in inspect.signature(value).parameters if parameter.startswith("_")]
    if hasattr(value, "__dataclass_fields__"):
        stock = {
            field.name
            for base in value.__mro__[1:]
            if base.__module__ != "builtins" and hasattr(base, "__dataclass_fields__")
            for field in fields(base)
        }
        private = [parameter for parameter in private if parameter not in stock]
    assert not private


def run(folder: Path, **fast: Any) -> FastSFTTrainer:
    ours = train(
        FastSFTTrainer, folder, packing=True, max_steps=4, logging_steps=1, save_strategy="steps", save_steps=3,
        eval_strategy="no", fast=fast,
    )  # fmt: skip
    assert isinstance(ours, FastSFTTrainer)
    return ours


def test_the_report_is_saved_and_shown_in_the_model_card(tmp_path: Path) -> None:
    ours = run(tmp_path)
    found = json.loads((tmp_path / "fastpack_report.json").read_text(encoding="utf-8"))
    assert (found["fastpack_trl"], found["step"]) == (fastpack_trl.__version__, 4)
    assert found["features"] == ours.fastpack_report.to_dict()["features"]
    assert found["proof"]["proven"]
    assert found["tokens_per_second"] > 0
    assert (tmp_path / "checkpoint-3").is_dir()

    ours.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count("### fastpack-trl") == 1
    assert f"{fastpack_trl.__version__}: `packed_attention` (" in card
    assert ("/OWNER/" in REPOSITORY) != (REPOSITORY in card), "no link to an address that does not exist"
    assert "tokens/s, between logs" in card
    assert "- Packing: passed: no document sees another" in card
    assert card.index("### fastpack-trl") < card.index("## Citations")


def test_off_writes_and_tells_nothing(tmp_path: Path) -> None:
    ours = run(tmp_path, save_report=False)
    ours.create_model_card()
    assert not (tmp_path / "fastpack_report.json").exists()
    assert "### fastpack-trl" not in (tmp_path / "README.md").read_text(encoding="utf-8")
