"""Files that ``fastpack-trl sft`` cannot use: one line with the value and the fix, and nothing written.

Wrong words and values, and folders of other things, are in `tests/test_misuses.py`.
"""

from __future__ import annotations

import json

import pytest
from sft_material import Material, make_tokenizer, refused, save_model, write_jsonl

from fastpack_trl.errors import UserError

MANY = "[" * 5000 + "]" * 5000
CONFIGS: dict[bytes, list[str]] = {
    b"": ["is empty", "YAML mapping"],
    b"- a\n- b\n": ["holds a list", "YAML mapping"],
    b"\xff\xfe\x00": ["cannot be read as UTF-8"],
    f"qqq: {MANY}".encode(): ["not valid YAML"],
}


@pytest.mark.parametrize("content", CONFIGS, ids=lambda content: repr(content[:20]))
def test_config_that_cannot_be_read(material: Material, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = material.folder / "sft.yaml"
    path.write_bytes(content)
    line = refused(material, capsys, "--config", path)
    assert all(part in line for part in [*CONFIGS[content], str(path)]), line


@pytest.mark.parametrize(
    ("about", "parts"),
    [
        ("bert BertForMaskedLM", ["is BertForMaskedLM", "'bert'", "causal language model"]),
        ("qwen3", ["a model without a head", "causal language model"]),
        ("qwen99", ["cannot be used", "qwen99"]),
        ("", ["has no config.json", "hub name"]),
    ],
)
def test_no_causal_model(material: Material, capsys: pytest.CaptureFixture[str], about: str, parts: list[str]) -> None:
    (folder := material.folder / "other").mkdir()
    kind, *heads = about.split() or [""]
    config = {"model_type": kind, "architectures": heads or None}
    if kind:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    line = refused(material, capsys, "--config", material.yaml(model_name_or_path=str(folder)))
    assert all(part in line for part in [*parts, str(folder)]), line


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("model.safetensors", b"", "model.safetensors is damaged (Safe"),
        ("tokenizer.json", None, "produces no tokens: its"),
        ("", None, "`pad_token` ('None') is not found in the vocabulary"),
    ],
)
def test_model_with_a_missing_or_cut_file(
    material: Material, capsys: pytest.CaptureFixture[str], file: str, content: bytes | None, part: str
) -> None:
    folder = save_model(material.folder / "other", tokenizer=None if file else make_tokenizer())
    if content is not None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-100])
    elif file:
        for name in (file, "tokenizer_config.json"):
            (folder / name).unlink()
    assert part in refused(material, capsys, "--config", material.yaml(model_name_or_path=str(folder)))


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (None, ["chat_template is not set"]),
        ("{{ raise_exception('users alone') }}", ["the chat template cannot render row 0", "users alone"]),
        ("{% for", ["template", "chat_template_path"]),
    ],
)
def test_chat_template_that_is_missing_or_cannot_render(
    material: Material, capsys: pytest.CaptureFixture[str], template: str | None, parts: list[str]
) -> None:
    model = save_model(material.folder / "other", tokenizer=make_tokenizer(pad_token="<pad>", eos_token="<eos>"))
    data = write_jsonl(material.folder / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 4)
    more = {}
    if template is not None:
        more["chat_template_path"] = str(material.folder / "chat.jinja")
        (material.folder / "chat.jinja").write_text(template, encoding="utf-8")
    path = material.yaml(model_name_or_path=str(model), dataset_name=str(data), **more)
    line = refused(material, capsys, "--config", path)
    assert all(part in line for part in parts), line


def test_launch_flags_under_a_launcher_and_from_python(
    material: Material, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpack_trl.recipe.train import train

    words = ["--config", str(material.yaml()), "--num_processes", "4"]
    with pytest.raises(UserError, match="--num_processes 4"):
        train(words)
    monkeypatch.setenv("LOCAL_RANK", "0")
    line = refused(material, capsys, *words)
    assert "--num_processes 4" in line
    assert "give them to the launcher" in line
