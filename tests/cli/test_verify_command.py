"""``fastpack-trl verify``: what it proves, what it prints, and every wrong argument on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpack_trl.cli import main as cli
from fastpack_trl.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models: gpt_oss, which leaks in stock, falcon, which our attention cannot reach, qwen3 and an adapter."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    root = tmp_path_factory.mktemp("verify")
    for family in ("gpt_oss", "falcon", "qwen3"):
        tiny_model(family).save_pretrained(root / family)
    lora = get_peft_model(tiny_model("qwen3"), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    lora.save_pretrained(root / "lora")
    prompt = get_peft_model(
        tiny_model("qwen3"),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="RANDOM"),
    )
    prompt.save_pretrained(root / "prompt")
    return root


def verify(folder: Path, family: str, *arguments: str) -> int:
    return cli.main(["verify", "--device", "cpu", "--model", str(folder / family), *arguments])


def test_stock_gpt_oss_leaks_and_auto_does_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "per_document" in out
    assert "window 5, sinks" in out
    assert "LEAK" not in out
    assert "0 of 12 pairs" in out
    record = json.loads(file.read_text())
    assert (record["proven"], record["leaks"], record["path"]) == (True, [], "per_document")
    assert record["difference"] <= record["budget"]
    assert record["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["per_document", "sdpa"])
def test_every_path_by_name(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert verify(folder, "gpt_oss", "--attn", name) == 0
    path = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("path"))
    assert path.split()[1] == name


def test_lengths_decide_what_is_exercised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "gpt_oss", "--lengths", "3", "2", "4") == 0
    out = capsys.readouterr().out
    assert "3 + 2 + 4 tokens" in out
    assert "not exercised  window 5 (no document is longer)" in out


def test_many_documents_are_listed_by_their_largest_leaks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "gpt_oss", "--attn", "off", "--lengths", *["2"] * 11) == 1
    out = capsys.readouterr().out
    assert "55 of 110 pairs" in out
    assert out.count("  from document ") == 20


def test_an_adapter_is_part_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "qwen3", "--adapter", str(folder / "lora")) == 0
    assert "path           per_document " in capsys.readouterr().out
    assert verify(folder, "qwen3", "--adapter", str(folder / "prompt")) == 2
    assert "prompt learning prepends virtual tokens to each row" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "shown"), [("qwen3", "bfloat16 on cpu"), ("gpt_oss", "(reported only below fp32")])
def test_weights_have_the_dtype_and_experts_below_fp32_no_budget(
    folder: Path, capsys: pytest.CaptureFixture[str], family: str, shown: str
) -> None:
    assert verify(folder, family, "--dtype", "bfloat16") == 0
    assert shown in capsys.readouterr().out


def test_cuda_that_is_not_there_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verify(folder, "qwen3", "--device", "cuda") == 2
    assert "no CUDA device: use --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "arguments", "parts"),
    [
        ("falcon", ["--attn", "per_document"], ["packed_attention='per_document' cannot be used here: falcon"]),
        ("qwen3", ["--lengths", "9", "x"], ["invalid int value: 'x'"]),
        ("qwen3", ["--dtype", "int8"], ["--dtype", "int8"]),
        ("qwen3", ["--adapter", "./absent"], ["--adapter './absent' is not a folder"]),
        ("lora", [], ["no config.json", "PEFT adapter", "--adapter"]),
        ("qwen3", ["--json", "absent/proof.json"], ["--json 'absent/proof.json'", "does not exist"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_a_wrong_argument_is_one_line_and_2(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], parts: list[str]
) -> None:
    assert verify(folder, model, *arguments) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if "verify: error" in line]
    assert all(part in line for part in parts), line
    assert captured.out == ""


def test_a_model_without_a_causal_head_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    assert verify(tmp_path, "") == 2
    assert "BertModel" in capsys.readouterr().err


def test_a_model_that_refuses_packed_rows_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("cannot keep packed sequences apart")

    monkeypatch.setattr("fastpack_trl.attention.proof.verify_packing", refuse)
    assert verify(folder, "qwen3", "--attn", "off") == 2
    assert "do not run with --attn off: cannot keep packed sequences apart; use --attn auto" in capsys.readouterr().err
