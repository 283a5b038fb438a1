"""Training with layers compiled by Inductor; a compiler or a cache that cannot be used costs them, not the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import adapters, compare, make
from trainer_material import assert_line, figures, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile.layers import decoder_layers
from fastpack_trl.testing import tiny_model

OPTIONS: dict[str, Any] = {"packing": True, "eval_strategy": "no", "gradient_checkpointing": False, "family": "llama"}
REMEDY = "set TORCHINDUCTOR_CACHE_DIR to a folder with room that can be written"


@pytest.mark.slow
def test_inductor_within_twice_the_error_of_eager(inductor: None) -> None:
    layers = compare(make("llama", lora=True, checkpointing=True), "inductor")
    assert layers.path == "inductor"


@pytest.mark.slow
def test_the_trainer_compiles_on_request_and_trains_the_same(tmp_path: Path, inductor: None) -> None:
    """Again where the entries of the cache cannot be read: another version's have other names, these other content.

    The graph is that of the test before, whose kernels, most of a minute on a CPU, are in the cache.
    """

    def run(name: str, layer_compile: str) -> Any:
        model = tiny_model("llama")
        return train(
            FastSFTTrainer, tmp_path / name, model=model, packing=True, gradient_checkpointing=True,
            fast={"layer_compile": layer_compile, "lora": "off"}, trainer={"peft_config": adapters(model, "llama")},
        )  # fmt: skip

    off = run("off", "auto")
    assert_line(off, "layer_compile", "cpu", status="off")
    on = run("on", "on")
    assert_line(on, "layer_compile", "LlamaDecoderLayer x 2 compiled in", status="on", path="inductor")
    for mine, plain in zip(figures(on), figures(off), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5, abs=2e-6)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(on.model))
    for kind in ("aotautograd", "fxgraph"):
        entries = [file for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], kind).rglob("*") if file.is_file()]
        assert entries
        for file in entries:
            file.write_bytes(b"of another version")
    torch._dynamo.reset()
    again = run("again", "on")
    assert again.fastpack_report["layer_compile"].path == "inductor"
    assert figures(again) == figures(on)


@pytest.mark.parametrize("lacks", ["compiler", "cache"])
def test_what_inductor_lacks_is_named_once_and_the_run_is_the_same(
    lacks: str, tmp_path: Path, inductor: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, or a cache in a folder below a file: not even the superuser can make it."""
    (tmp_path / "file").write_text("")
    off = train(FastSFTTrainer, tmp_path / "off", fast={"layer_compile": "off"}, **OPTIONS)
    torch._dynamo.reset()
    without = {"cpp.cxx": ("no-such-compiler",)} if lacks == "compiler" else {}
    if lacks == "cache":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with torch._inductor.config.patch(without):
        on = train(FastSFTTrainer, tmp_path / "on", fast={"layer_compile": "on"}, **OPTIONS)
    line = on.fastpack_report["layer_compile"]
    assert (line.status, line.path) == ("stock", "eager"), line
    expected = ["ompiler"] if lacks == "compiler" else ["NotADirectoryError", REMEDY]
    assert all(said in line.reason for said in expected), line.reason
    assert (REMEDY in line.reason) == (lacks == "cache")
    assert sum("layer_compile" in record.message for record in caplog.records) == 1
    assert figures(on) == figures(off)
