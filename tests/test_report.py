"""The banner: 80 columns, what is on first, what is off by name; the whole report on request."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import fastpack_trl
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


def test_a_report_of_what_is_off_alone_says_why() -> None:
    report = FeatureReport()
    report.add("packed_attention", "off", "stock", "packing is off")
    assert "packing is off" in report.banner()


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
