"""Adapters, also over resized or tied embeddings: merged, they compute what they did before, and they answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jinja2 import TemplateError
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from sft_material import SENTENCES, TEMPLATE, Material, make_tokenizer, save_model, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from fastpack_trl.cli.main import main
from fastpack_trl.cli.trained import turn_of
from fastpack_trl.testing import tiny_model

ROWS = 304
ALL = {"target_modules": "all-linear"}
EMBEDDINGS = {"target_modules": ["q_proj", "embed_tokens"]}
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
UNTIED, RESIZED = "lm_head: untied from the embeddings (tie_word_embeddings=false)", "embeddings: 304 rows -> 320"


VISION = {
    "hidden_size": 16, "depth": 1, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TEXT = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, **HEADS}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4ForConditionalGeneration", {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16,
        "vocab_size_per_layer_input": ROWS, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
    }),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
}  # fmt: skip


def base_of(kind: str) -> Any:
    """A model with weights that differ from token to token, and from layer to layer."""
    family, _, more = kind.partition(" ")
    if family == "qwen3":
        return tiny_model("qwen3", hidden_size=32, head_dim=16, vocab_size=ROWS, tie_word_embeddings=more == "tied")
    torch.manual_seed(0)
    name, text = MORE[family]
    towers = {"vision_config": VISION} | ({"audio_config": None} if family == "gemma4" else {})
    return getattr(transformers, name)(AutoConfig.for_model(family, text_config=TEXT | text, **towers))


def logits(model: Any, rows: int = 61) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([[5, 9, 33, 120, 7, 60, rows - 1]])).logits.float()
    return found


def save_adapter(folder: Path, kind: str, rows: int, more: dict[str, Any], **saving: Any) -> tuple[Path, Any]:
    """An adapter as a script leaves it, over a base in a folder of its own; and its logits."""
    base_of(kind).save_pretrained(folder / "base")
    make_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder / "base")
    plain = AutoConfig.from_pretrained(folder / "base")
    base = getattr(transformers, plain.architectures[0]).from_pretrained(folder / "base")
    base.resize_token_embeddings(rows)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter", **saving)
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([f"<new{number}>" for number in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter", logits(model, rows)


@pytest.mark.parametrize(
    ("kind", "rows", "more", "says"),
    [
        ("qwen3 tied", 320, ALL, (RESIZED,)),
        ("qwen3", 320, ALL, (RESIZED,)),
        ("qwen3 tied", 320, ALL | BOTH, (RESIZED, UNTIED)),
        ("qwen3 tied", 302, ALL, ("embeddings: 304 rows -> 302",)),
        ("qwen3 tied", 320, EMBEDDINGS, (RESIZED, UNTIED)),
        ("qwen3 tied", 320, ALL | {"trainable_token_indices": [5, 310]}, (RESIZED,)),
        ("qwen3 tied", ROWS, EMBEDDINGS, (UNTIED,)),
        ("qwen3 tied", ROWS, {"target_modules": ["q_proj", "lm_head"]}, (UNTIED,)),
        ("qwen3 tied", ROWS, {"modules_to_save": ["embed_tokens"]}, (UNTIED,)),
        ("qwen3 tied", ROWS, EMBEDDINGS | {"ensure_weight_tying": True}, ()),
        ("gemma4", 320, {"target_modules": r".*language_model.*(q_proj|embed_tokens)"}, (RESIZED, UNTIED)),
        ("qwen3_5", ROWS, ALL, ()),
    ],
)
def test_merged_model_computes_what_the_adapter_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, rows: int, more: dict[str, Any], says: Any
) -> None:
    adapter, expected = save_adapter(tmp_path, kind, rows, more)
    assert main(["merge", str(adapter)]) == 0
    said = capsys.readouterr().out
    assert [line for line in (RESIZED[:11], UNTIED[:8]) if line in said] == [line.partition(" ")[0] for line in says]
    assert all(line in said for line in says), said
    merged = Path(f"{adapter}-merged")
    config = AutoConfig.from_pretrained(merged)
    model = getattr(transformers, config.architectures[0]).from_pretrained(merged)
    found = logits(model, rows)
    if kind.startswith("gemma4") and rows > ROWS:  # PEFT does not save its embeddings per layer
        found, expected = found[:, :-1], expected[:, :-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == config.tie_word_embeddings == (UNTIED not in says and kind not in ("qwen3", "qwen3_5"))
    assert main(["generate", str(adapter), "--prompt", "the quick", "--max_new_tokens", "2"]) == 0


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_template_of_another_model_adds_tokens_and_the_run_is_merged(material: Material, tied: bool) -> None:
    """`sft` with the template of another model, whose tokens are new, then `merge` with the same YAML."""
    other, model = make_tokenizer(pad_token="<pad>", eos_token="<end>"), material.folder / "model"
    other.add_tokens(["<user>", "<assistant>"])
    other.chat_template = TEMPLATE.replace("<eos>", "<end>")
    other.save_pretrained(material.folder / "other")
    save_model(model)
    if not tied:
        base_of("qwen3").save_pretrained(model)
    turns = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in SENTENCES * 2]
    data = write_jsonl(material.folder / "turns.jsonl", [{"messages": each} for each in turns])
    path = material.yaml(
        model_name_or_path=str(model), chat_template_path=str(material.folder / "other"), dataset_name=str(data),
        use_peft=True, lora_r=4, lora_target_modules="all-linear", learning_rate=0.05,
    )  # fmt: skip
    assert main(["sft", "--config", str(path)]) == 0
    adapter = AutoPeftModelForCausalLM.from_pretrained(material.out).get_base_model().eval()
    with torch.no_grad():  # the product, as PEFT cannot run a head that is saved whole and has trained tokens too
        ids = torch.tensor([[5, 9, 33, 120, 7, 319]])
        expected = adapter.model(ids).last_hidden_state @ adapter.get_output_embeddings().weight.T
        assert main(["merge", "--config", str(path)]) == 0
        merged = AutoModelForCausalLM.from_pretrained(f"{material.out}-merged").eval()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert main(["generate", "--config", str(path), "--prompt", "the quick"]) == (2 if tied else 0)


def test_rows_an_adapter_was_saved_without_are_called_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, _ = save_adapter(tmp_path, "qwen3 tied", 320, ALL, save_embedding_layers=False)
    assert main(["merge", str(adapter)]) == 0
    assert "; rows from 304 on are newly initialized, because the adapter was saved" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(f"{adapter}-merged")
    assert merged.get_input_embeddings().weight.shape[0] == 320
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


def test_no_merge_with_other_models_or_into_a_filled_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, _ = save_adapter(tmp_path, "qwen3", ROWS, {"target_modules": ["q_proj"]})
    deeper = tiny_model("qwen3", hidden_size=32, head_dim=16, vocab_size=ROWS, num_hidden_layers=3)
    deeper.save_pretrained(tmp_path / "deeper")
    assert main(["merge", str(adapter), "--base", str(tmp_path / "deeper")]) == 2
    assert f"has no weights for some layers of '{tmp_path / 'deeper'}', or more than" in capsys.readouterr().err
    assert not Path(f"{adapter}-merged").exists()
    assert main(["merge", str(adapter)]) == 0

    def times() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}

    before = times()
    for words in ([], ["--output", str(tmp_path / "base")], ["--output", str(adapter)]):
        assert main(["merge", str(adapter), *words]) == 2
        assert "is not empty: name another folder" in capsys.readouterr().err
    assert times() == before
    (tmp_path / "empty").mkdir()
    assert main(["merge", str(adapter), "--output", str(tmp_path / "empty")]) == 0


LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "learning_rate": 0.05}


def trained(material: Material, **more: object) -> Path:
    """The YAML of a run that has left an adapter."""
    path = material.yaml(**LORA | more)
    assert main(["sft", "--config", str(path)]) == 0
    return path


@pytest.mark.parametrize("named", ["--config", "--load_in_4bit"])
def test_qlora_is_merged_as_it_trained(material: Material, capsys: pytest.CaptureFixture[str], named: str) -> None:
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
    assert f"{model} (both unchanged), as during training: quantized, then dequantized" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((merged / "config.json").read_text(encoding="utf-8"))
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    dense = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantization).dequantize()
    expected = logits(PeftModel.from_pretrained(dense, material.out))
    unquantized = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), material.out))
    found = logits(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert (found - expected).abs().mean() < 0.2 * (found - unquantized).abs().mean()


def test_a_run_is_merged_and_answers_beside_its_base(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    path, merged, record = trained(material), material.folder / "merged", material.folder / "answers.json"
    assert main(["merge", str(material.out), "--output", str(merged)]) == 0
    said = f"merged {material.out} with its base {material.model} (both unchanged)\nwritten: {merged}"
    assert said in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(material.model)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, material.out))
    assert (expected - before).abs().max() > 0.01, "the adapter has learned"
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-4, atol=1e-4)
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


def test_a_base_not_trained_on_is_not_merged_into(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    "content", ["m.content", "m.content[0].text", "(m.content | selectattr('type', 'defined') | first).text"]
)
def test_a_prompt_is_in_its_turn_whatever_the_template_reads(content: str) -> None:
    """Templates of models for images read the parts of a turn: given a text they raise, or leave it out."""
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = f"{{% for m in messages %}}<{{{{ m.role }}}}> {{{{ {content} }}}}{{% endfor %}}"
    assert turn_of(tokenizer, " the quick\n") == "<user>  the quick\n"
    tokenizer.chat_template = "{{ raise_exception('no roles') }}"
    with pytest.raises(TemplateError, match="no roles"):
        turn_of(tokenizer, "the")


def test_an_answer_without_text_is_said(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    silent = AutoModelForCausalLM.from_pretrained(material.model)
    torch.nn.init.zeros_(silent.lm_head.weight)  # all logits alike: the first token, which pads
    silent.save_pretrained(folder := material.folder / "silent")
    make_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    assert main(["generate", str(folder), "--prompt", "the quick", "--max_new_tokens", "8"]) == 0
    assert "prompt: the quick\nmodel: (no text)\n" in capsys.readouterr().out
