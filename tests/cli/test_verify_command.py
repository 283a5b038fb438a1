"""``fastpack-trl verify``: what it proves, what it prints, and every wrong argument on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_material import composite

from fastpack_trl.cli import main as cli
from fastpack_trl.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models: gpt_oss, which leaks in stock, falcon, which our attention cannot reach, qwen3 and an adapter."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    root = tmp_path_factory.mktemp("verify")
    for family in ("gpt_oss", "falcon", "qwen3"):
        tiny_model(family).save_pretrained(root / family)
    (root / "headless").mkdir()
    headless = '{"model_type": "bert", "architectures": ["BertModel"]}'
    (root / "headless" / "config.json").write_text(headless, encoding="utf-8")
    lora = get_peft_model(tiny_model("qwen3"), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    lora.save_pretrained(root / "lora")
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="RANDOM")
    get_peft_model(tiny_model("qwen3"), virtual).save_pretrained(root / "prompt")
    return root


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def verify(folder: Path, family: str, *arguments: str) -> int:
    return cli.main(["verify", "--model", str(folder / family), *arguments])


def test_gpt_oss_leaks_in_trl_but_not_in_auto(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proof.json"
    assert verify(folder, "gpt_oss", "--attn", "off", "--json", str(file)) == 1
    captured = capsys.readouterr()
    assert "LEAK: 6 of 12 pairs" in captured.out
    (line,) = [line for line in captured.err.splitlines() if line.startswith("fastpack-trl verify: failed")]
    assert "fix: train with packed_attention='auto'" in line
    record = json.loads(file.read_text())
    assert record["path"] == "stock"
    assert not record["proven"]
    # Attention is causal: a document can only see those before it.
    assert {(leak["from"], leak["to"]) for leak in record["leaks"]} == {
        (source, target) for target in range(4) for source in range(target)
    }

    assert verify(folder, "gpt_oss", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "window 5, sinks" in out
    assert "LEAK" not in out
    record = json.loads(file.read_text())
    assert (record["proven"], record["leaks"], record["path"]) == (True, [], "per_document")
    assert record["difference"] <= record["budget"]


@pytest.mark.parametrize(
    ("family", "words", "shown"),
    [
        ("gpt_oss", "--attn per_document", ["path       per_document "]),
        ("gpt_oss", "--attn sdpa", ["path       sdpa "]),
        ("qwen3", "--adapter {folder}/lora", ["path       per_document "]),
        ("qwen3", "--dtype bfloat16", ["bfloat16 on cpu"]),
        ("gpt_oss", "--dtype bfloat16", [", no limit)"]),
    ],
)
def test_path_adapter_and_dtype_are_those_that_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], family: str, words: str, shown: list[str]
) -> None:
    assert verify(folder, family, *words.format(folder=folder).split()) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in shown), out


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("falcon", "--attn per_document", "packed_attention='per_document' cannot be used here: falcon"),
        ("qwen3", "--adapter {folder}/prompt", "prompt learning prepends virtual tokens to each row"),
        ("lora", "", "no config.json: it is a PEFT adapter: name its base model, and give this folder to --adapter"),
        ("headless", "", "is BertModel"),
    ],
)
def test_a_wrong_argument_is_one_line_and_2(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, words: str, says: str
) -> None:
    assert verify(folder, model, *words.format(folder=folder).split()) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if "verify: error" in line]
    assert says in line
    assert captured.out == ""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_model_of_images_and_text_is_checked_on_text(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composite(family).save_pretrained(tmp_path / family)
    assert verify(tmp_path, family) == 0
    assert "documents are isolated" in capsys.readouterr().out


def test_a_model_that_refuses_packed_rows_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("cannot keep packed sequences apart")

    monkeypatch.setattr("fastpack_trl.attention.proof.verify_packing", refuse)
    assert verify(folder, "qwen3", "--attn", "off") == 2
    assert "do not run with --attn off: cannot keep packed sequences apart; use --attn auto" in capsys.readouterr().err
