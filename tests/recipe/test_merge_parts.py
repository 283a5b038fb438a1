"""A merged model has all that its checkpoint had: processors, templates, generation config, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sft_material import TEMPLATE, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)
from vision_material import image_data, save_image_model

from fastpack_trl.cli.main import main
from fastpack_trl.testing import tiny_model

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
from .sizes import SCALE

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
SIZE = {"height": 28, "width": 28}


def tokenizer(**more: Any) -> Any:
    return make_tokenizer(pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE, **more)


def save_base(kind: str, folder: Path) -> None:
    """A checkpoint of some kind with a text model, which is what counts for the files beside it."""
    model = tiny_model("qwen3", hidden_size=32, head_dim=16, vocab_size=304)
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(size=SIZE, crop_size=SIZE)
        words = tokenizer(extra_special_tokens={"image_token": "<image>"})
        transformers.LlavaProcessor(images, words, patch_size=14, chat_template="{{ 'llava' }}").save_pretrained(folder)
    elif kind == "old layout":
        transformers.CLIPImageProcessorPil(size=SIZE, crop_size=SIZE).save_pretrained(folder)
        about = {"processor_class": "LlavaProcessor", "patch_size": 14}
        (folder / "processor_config.json").write_text(json.dumps(about), encoding="utf-8")
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'old' }}"}), encoding="utf-8")
    elif kind == "speech":
        transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    elif kind == "templates":
        tokenizer().save_pretrained(folder)
        words = AutoTokenizer.from_pretrained(folder)
        words.chat_template = {"default": TEMPLATE, "tool_use": "{{ 'tools' }}"}
        words.save_pretrained(folder)
    elif kind == "code":
        (folder / "modeling_own.py").write_text(CODE, encoding="utf-8")
        (folder / "sizes.py").write_text("SCALE = 1", encoding="utf-8")
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text("def generate(model): ...", encoding="utf-8")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
        config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": names}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def save_adapter(folder: Path, trust: bool = False) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", trust_remote_code=trust)
    tuned = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    tuned.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("own", [True, False], ids=["tokenizer with the adapter", "base only"])
@pytest.mark.parametrize("kind", ["llava", "old layout", "speech", "templates", "code"])
def test_merged_folder_has_all_parts_of_the_checkpoint(tmp_path: Path, kind: str, own: bool) -> None:
    base, trust = tmp_path / "base", {"trust_remote_code": kind == "code"}
    save_base(kind, base)
    adapter = save_adapter(tmp_path, kind == "code")
    if own:  # as a script leaves it: trained with another template
        words = AutoTokenizer.from_pretrained(base)
        words.chat_template = words.chat_template if kind == "templates" else "{{ 'trained' }}"
        words.save_pretrained(adapter)
    assert main(["merge", str(adapter), *(["--trust_remote_code"] if kind == "code" else [])]) == 0
    merged = Path(f"{adapter}-merged")
    lost = {str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()} - {
        str(file.relative_to(merged)) for file in merged.rglob("*")
    }
    assert lost == ({"chat_template.json"} if own and kind == "old layout" else set())
    assert GenerationConfig.from_pretrained(merged) == GenerationConfig.from_pretrained(base)
    if kind == "speech":
        found, expected = (transformers.AutoFeatureExtractor.from_pretrained(each) for each in (merged, base))
        assert found.to_dict() == expected.to_dict()
    processor, expected = (AutoProcessor.from_pretrained(each, **trust) for each in (merged, base))
    assert type(processor) is type(expected)
    assert processor.chat_template == ("{{ 'trained' }}" if own and kind != "templates" else expected.chat_template)
    if kind in ("llava", "old layout"):
        assert processor.image_processor.to_dict() == expected.image_processor.to_dict()
    model = AutoModelForCausalLM.from_pretrained(merged, **trust)
    assert type(model).__name__ == ("OwnForCausalLM" if kind == "code" else "Qwen3ForCausalLM")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5", "llava"])
def test_adapter_of_an_image_model_merges_with_its_processor(family: str, tmp_path: Path) -> None:
    base = save_image_model(family, tmp_path / "base")
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    if family != "llava":  # as a trainer leaves it; a script may save the adapter alone
        AutoProcessor.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter")]) == 0
    merged = tmp_path / "adapter-merged"
    processor, found = AutoProcessor.from_pretrained(merged), AutoModelForImageTextToText.from_pretrained(merged)
    assert type(found) is type(model.get_base_model())
    example = image_data(1, family=family, images=1)[0]
    batch = processor(images=example["images"], text=example["prompt"], return_tensors="pt")
    expected = AutoProcessor.from_pretrained(base)(images=example["images"], text=example["prompt"])
    assert batch["input_ids"].tolist() == expected["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def rewrite(name: str, **changes: object) -> Callable[[Path], object]:
    def act(folder: Path) -> object:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        return (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return act


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def other_tensors(name: str) -> Callable[[Path], object]:
    return lambda folder: save_file({"other": torch.zeros(2)}, folder / name)


def pickled(name: str, source: str, keep: float) -> Callable[[Path], object]:
    def act(folder: Path) -> object:
        torch.save(load_file(folder / source), folder / name)
        (folder / source).unlink()
        content = (folder / name).read_bytes()
        return (folder / name).write_bytes(content[: int(keep * len(content))])

    return act


ADAPTER, BASE = "adapter/adapter_model.safetensors", "base/model.safetensors"
CONFIG, OWN = "base/config.json", "adapter/adapter_config.json"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "list": (text(OWN, "[1]"), "adapter_config.json is damaged"),
    "brackets": (text(OWN, "[" * 100_000), "adapter_config.json is damaged"),
    "peft_type": (rewrite(OWN, peft_type="NEW"), "KeyError: NEW"),
    "r": (rewrite(OWN, r=None), "the adapter"),
    "rank": (rewrite(OWN, r=8), "size mismatch"),
    "pattern": (rewrite(OWN, target_modules="(("), "the adapter"),
    "base": (rewrite(OWN, base_model_name_or_path=[1]), "does not name its base model: give --base DIR"),
    "tokens": (rewrite(OWN, trainable_token_indices=["x"]), "the adapter"),
    "others": (other_tensors(ADAPTER), "has no weights for some layers"),
    "bin": (pickled("adapter/adapter_model.bin", ADAPTER, 0.9), "adapter_model.bin is damaged"),
    "base tensors": (other_tensors(BASE), "it has no ['lm_head.weight'"),
    "base bin": (pickled("base/pytorch_model.bin", BASE, 0.99), "pytorch_model.bin is damaged"),
    "heads": (rewrite(CONFIG, num_attention_heads=0), "ZeroDivisionError"),
    "layers": (rewrite(CONFIG, num_hidden_layers="two"), "correct its config.json"),
    "activation": (rewrite(CONFIG, hidden_act="none"), "the model"),
    "shallower": (rewrite(CONFIG, num_hidden_layers=1, layer_types=["full_attention"]), "or more than it has"),
    "tokenizer": (text("base/tokenizer.json", "{}"), "the tokenizer in"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_base("text", folder / "base")
    save_adapter(folder)
    return folder


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_input_is_one_line(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder, (damage, message) = shutil.copytree(whole, tmp_path / "a b\n'🙂"), DAMAGED[name]
    rewrite(OWN, base_model_name_or_path=str(folder / "base"))(folder)
    damage(folder)
    for words in (["merge", str(folder / "adapter")], ["generate", str(folder / "adapter"), "--prompt", "the"]):
        assert main(words) == 2
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("fastpack-trl")]
        assert message in line
    if "base" in name and name != "base":
        assert main(["verify", "--model", str(folder / "base")]) == (0 if "tensors" in name else 2)
    assert not (folder / "adapter-merged").exists()


def test_output_is_apart_and_printed_quoted(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for inside in (whole / "adapter" / "merged", whole / "base" / "merged", whole / "adapter" / ".." / "base" / "new"):
        assert main(["merge", str(whole / "adapter"), "--output", str(inside)]) == 2
        assert "is inside of" in capsys.readouterr().err
    assert main(["merge", str(whole / "adapter"), "--output", "x" * 10_000]) == 2
    assert main(["merge", str(whole / "adapter"), "--output", str(tmp_path / "my\n'🙂' run")]) == 0
    said = capsys.readouterr().out.partition("try it: ")
    assert len(said[0].splitlines()) == 2
    assert """my\n'"'"'🙂'"'"' run' --prompt""" in said[2]
