"""After training: the merged model computes what the adapter did, and answers are shown beside those of the base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from sft_material import TEMPLATE, Material, make_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fastpack_trl.cli.main import main
from fastpack_trl.testing import tiny_model

IDS = torch.tensor([[5, 9, 33, 120, 7, 60]])
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "learning_rate": 0.05}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def trained(material: Material, **more: object) -> Path:
    """The YAML of a run that has left an adapter."""
    path = material.yaml(**LORA | more)
    assert main(["sft", "--config", str(path)]) == 0
    return path


@pytest.mark.parametrize("named", ["--config", "--load_in_4bit"])
def test_after_qlora_it_is_merged_into_the_base_that_was_trained_on(
    material: Material, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    pytest.importorskip("bitsandbytes")
    model = material.folder / "wide"
    tiny_model("qwen3", hidden_size=64, head_dim=16, intermediate_size=64, vocab_size=304).save_pretrained(model)
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    path = trained(material, model_name_or_path=str(model), load_in_4bit=True, max_length=32)
    merged = material.folder / "out-merged"
    words = ["--config", path] if named == "--config" else [material.out, "--load_in_4bit"]
    assert main(["merge", *map(str, words)]) == 0
    assert f"{model} as during training: quantized, then dequantized" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((merged / "config.json").read_text(encoding="utf-8"))
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    dense = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantization).dequantize()
    expected = logits(PeftModel.from_pretrained(dense, material.out))
    torch.testing.assert_close(logits(load(merged)), expected, rtol=1e-2, atol=1e-2)
    unquantized = logits(PeftModel.from_pretrained(load(model), material.out))
    found = logits(load(merged))
    assert (found - expected).abs().mean() < 0.2 * (found - unquantized).abs().mean()


def test_a_run_is_merged_and_its_answers_stand_beside_those_of_the_base(
    material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    path, merged, record = trained(material), material.folder / "merged", material.folder / "answers.json"
    assert main(["merge", str(material.out), "--output", str(merged)]) == 0
    assert f"{material.out} merged into {material.model}\nwritten: {merged}" in capsys.readouterr().out
    base = load(material.model)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, material.out))
    assert (expected - before).abs().max() > 0.01, "the adapter has learned"
    torch.testing.assert_close(logits(load(merged)), expected, rtol=1e-4, atol=1e-4)
    assert (merged / "tokenizer_config.json").is_file()
    assert not (merged / "adapter_config.json").exists()

    def answers(*words: object) -> list[dict[str, str]]:
        asked = [*words, "--prompt", "the quick", "--prompt", "a b", "--max_new_tokens", 6, "--json", record]
        assert main(["generate", *map(str, asked)]) == 0
        return list(json.loads(record.read_text(encoding="utf-8"))["rows"])

    rows, out = answers("--config", path), capsys.readouterr().out
    assert [row.keys() for row in rows] == [{"prompt", "base", "adapter"}] * 2
    assert any(row["base"] != row["adapter"] for row in rows)
    assert all(f"{name}: {text.strip()}" in out for row in rows for name, text in row.items())
    assert [row["model"] for row in answers(material.model)] == [row["base"] for row in rows]


def test_a_base_that_was_not_trained_on_is_not_merged_into(
    material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(material.model, material.folder / "own")
    path = trained(material, model_name_or_path=str(own))
    path.write_text(path.read_text(encoding="utf-8").replace(str(own), str(material.model)), encoding="utf-8")
    words = ["merge", "--config", str(path), "--output", str(material.folder / "merged")]
    assert main(words) == 2
    assert f"is for '{own}', {path} names '{material.model}': choose with --base DIR" in capsys.readouterr().err
    assert main([*words, "--base", str(material.model)]) == 0
    shutil.rmtree(material.folder / "merged")
    shutil.rmtree(own)  # it may have moved to the other
    assert main(words) == 0


def test_an_answer_without_text_is_said(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    silent = load(material.model)
    torch.nn.init.zeros_(silent.lm_head.weight)  # all logits alike: the first token, which pads
    silent.save_pretrained(folder := material.folder / "silent")
    make_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    assert main(["generate", str(folder), "--prompt", "the quick", "--max_new_tokens", "8"]) == 0
    assert "prompt: the quick\nmodel: (no text)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("merge", "no model: give the folder that a run has written, or its YAML with --config FILE"),
        ("generate {two} --prompt a", "holds an adapter and a full model, of two runs: move one away"),
        ("generate {scores} --prompt a", "is a reward model, which scores a text and writes none"),
        ("merge ./absent", "the model './absent' is not a folder"),
        ("merge {adapter} --output {model}", "is not empty: name another folder"),
        ("merge {adapter} --base ./absent", "--base './absent' is not a folder"),
        ("generate {model} --file b", "generate --file was removed in 0.2.0: give --prompt once per text"),
        ("generate {model} --prompt a --temperature -1", "--temperature -1.0 must be >= 0"),
        ("generate {model} --promt a", "did you mean '--prompt'?"),
    ],
)
def test_a_misuse_is_one_line(material: Material, capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    adapter = material.folder / "adapter"
    adapter.mkdir()
    about = {"base_model_name_or_path": str(material.model), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    save_file({"weight": IDS}, adapter / "adapter_model.safetensors")
    scores = shutil.copytree(adapter, material.folder / "scores")
    (scores / "adapter_config.json").write_text(json.dumps(about | {"task_type": "SEQ_CLS"}), encoding="utf-8")
    two = shutil.copytree(adapter, material.folder / "two")
    save_file({"weight": IDS}, two / "model.safetensors")
    given = {"model": material.model, "adapter": adapter, "scores": scores, "two": two}
    assert main(words.format(**given).split()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert says in err
    assert err.startswith(f"fastpack-trl {words.split()[0]}: error: ")
