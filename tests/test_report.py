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


def test_the_banner_has_80_columns_and_the_whole_report_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTPACK_VERBOSE", raising=False)
    report = FeatureReport()
    report.add("fused_layers", "off", "stock", "the model is on cpu: its kernels need CUDA")
    report.add("packed_attention", "on", "per_document", "cpu; plain causal; varlen needs CUDA, the model is on cpu")
    report.add("moe", "stock", "stock", "experts_implementation='batched_mm' was chosen " + "x" * 90)
    report.add("cuda_graph", "off", "eager", "the model is on cpu")
    report.add("a feature with a very long name, longer than half a line", "on", "fast", "because " * 20)
    report.facts["truncated tokens"] = "1,218 tokens (53.0%) of 14 documents cut by max_length=64; 229 keeps them"
    lines = report.banner().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"fastpack-trl {fastpack_trl.__version__}"
    states = [line.split()[0] for line in lines[1:] if line[:1] in "os" and line[:7].strip() in ("on", "stock", "off")]
    assert states == ["on", "on", "stock", "off"]
    assert "off    fused_layers, cuda_graph (why: --verbose or FASTPACK_VERBOSE=1)" in lines
    assert "its kernels need CUDA" not in report.banner()

    whole = str(report)
    assert max(map(len, whole.splitlines())) <= 80
    assert all(line.feature in " ".join(whole.split()) and line.reason.split()[0] in whole for line in report)
    monkeypatch.setenv("FASTPACK_VERBOSE", "1")
    assert report.banner() == whole
    monkeypatch.delenv("FASTPACK_VERBOSE")
    off = FeatureReport()
    off.add("packed_attention", "off", "stock", "packing is off")
    assert "packing is off" in off.banner(), "if all of it is off, the reasons are what is left to say"


def test_packed_attention_says_its_path() -> None:
    with packed_attention(tiny_model("qwen3"), "per_document") as attention:
        assert repr(attention).startswith("PackedAttention(path='per_document', reason='")


def test_no_public_signature_has_a_private_parameter() -> None:
    for name in fastpack_trl.__all__:
        value: Any = getattr(fastpack_trl, name)
        if callable(value):
            bases = [base for base in getattr(value, "__mro__", ())[1:] if hasattr(base, "__dataclass_fields__")]
            inherited = {field.name for base in bases for field in fields(base)}
            assert not [one for one in inspect.signature(value).parameters if one[0] == "_" and one not in inherited]


@pytest.mark.parametrize("saves", [True, False])
def test_the_report_is_saved_and_shown_in_the_model_card_unless_it_is_off(saves: bool, tmp_path: Path) -> None:
    options = {"packing": True, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    ours = train(FastSFTTrainer, tmp_path, fast={"save_report": saves}, **options)
    ours.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count("### fastpack-trl") == saves
    assert (tmp_path / "fastpack_report.json").exists() == saves
    if not saves:
        return
    found = json.loads((tmp_path / "fastpack_report.json").read_text(encoding="utf-8"))
    assert (found["fastpack_trl"], found["step"]) == (fastpack_trl.__version__, 4)
    assert found["features"] == ours.fastpack_report.to_dict()["features"]
    assert found["proof"]["proven"]
    assert found["tokens_per_second"] > 0
    assert f"{fastpack_trl.__version__}: `packed_attention` (" in card
    assert ("/OWNER/" in REPOSITORY) != (REPOSITORY in card), "no link to an address that does not exist"
    assert "tokens/s, between logs" in card
    assert "- Packing: passed: documents are isolated" in card
    assert card.index("### fastpack-trl") < card.index("## Citations")
