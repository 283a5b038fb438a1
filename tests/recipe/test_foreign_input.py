"""Configs of strangers: three groups of keys, lists as text; text never becomes structure; wrong types, alias bombs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import date
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastpack_trl.cli.main import main
from fastpack_trl.errors import UserError, printable
from fastpack_trl.recipe import arguments
from fastpack_trl.recipe.foreign import _KEYS, _TOOLS, GROUPS, Converted, convert
from fastpack_trl.recipe.yaml import dump, load_config
from fastpack_trl.testing import tiny_model

BASES: Mapping[str, dict[str, Any]] = {
    "Axolotl": {"base_model": "m", "sequence_len": 9, "datasets": [{"path": "x.jsonl"}]},
    "LLaMA-Factory": {"model_name_or_path": "m", "cutoff_len": 9, "stage": "sft", "dataset": "x"},
    "Unsloth": {"model_name": "m", "max_seq_length": 9, "dataset": "x"},
}
"""The least that is recognized."""
USUAL = {
    "Axolotl": ("""
base_model: m; model_type: AutoModelForCausalLM; tokenizer_type: AutoTokenizer; load_in_8bit: false; adapter: lora
strict: false; chat_template: llama3; dataset_prepared_path: last_run_prepared; val_set_size: 0.1; lora_r: 4
datasets: [{path: x, type: chat_template, field_messages: conversations, roles_to_train: [assistant],
  train_on_eos: turn, message_property_mappings: {role: from, content: value}}]; gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}; lora_mlp_kernel: true; lora_o_kernel: true; sequence_len: 64
sample_packing: true; pad_to_sequence_len: true; plugins: [axolotl.integrations.liger.LigerPlugin]; liger_rope: true
optimizer: adamw_torch; learning_rate: 2e-4; bf16: auto; tf32: false; flash_attention: true; saves_per_epoch: 1
resume_from_checkpoint: ; special_tokens: {pad_token: <pad>, bos_token: <eos>}""",
        {"bos_token", "chat_template", "excess_length_strategy"}, 8),
    "LLaMA-Factory": ("""
model_name_or_path: m; trust_remote_code: true; stage: sft; do_train: true; finetuning_type: lora; lora_rank: 4
dataset_dir: .; template: llama3; cutoff_len: 64; overwrite_cache: true; plot_loss: true; quantization_method: bnb
flash_attn: fa2; enable_liger_kernel: true; use_unsloth: false; warmup_ratio: 0.1""", {"trust_remote_code", "template"},
        3),
    "Unsloth": ("""
model: m; data: {dataset: x, format_type: auto}; logging: {enable_wandb: false, hf_token: hf_secret}
training: {training_type: lora, max_seq_length: 64, random_seed: 3, gradient_checkpointing: unsloth}
lora: {lora_r: 4, target_modules: 'q_proj,v_proj', bias: none, use_dora: false}""", {"hf_token", "defaults"}, 1),
}  # fmt: skip
"""A YAML, what needs the user, and how many keys are automatic here."""


@pytest.mark.parametrize("tool", USUAL)
def test_a_usual_config_names_only_what_needs_the_user_and_shows_it_first(tool: str) -> None:
    text, needs, automatic = USUAL[tool]
    out = convert(yaml.safe_load(text.replace("; ", "\n")), Path())
    keys = [[key for key, (of, _) in out.notes.items() if of == group] for group in GROUPS]
    assert ({*keys[0]}, len(keys[2])) == (needs, automatic)
    titles = re.findall(r"^# (\w.*) \(\d+\):$", out.text("a", "b"), re.MULTILINE)
    assert titles == [group for group, names in zip(GROUPS, keys, strict=True) if names]
    assert "hf_secret" not in out.text("a", "b")
    assert out.values.get("dataset_format") == ("sharegpt" if tool == "Axolotl" else None)


@pytest.mark.parametrize("tool", ["Unsloth", "Axolotl"])
def test_what_the_guide_says_to_remove_is_automatic(tool: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    section = page.partition(f"## From {tool}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*`[^|]*) \| *remove", section, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)", row)}
    out = Converted(tool)
    for key in keys:
        out.take(key, True, {key: "bool"})
    assert out.notes.keys() == keys
    assert {group for group, _ in out.notes.values()} == {"automatic here"}


@pytest.mark.parametrize(
    ("tool", "key", "value", "to", "expected"),
    [
        ("Axolotl", "lora_modules_to_save", "embed, lm_head,", "lora_modules_to_save", ["embed", "lm_head"]),
        ("Axolotl", "lora_target_modules", r"layers\.\d{1,2}\..*", "lora_target_modules", r"layers\.\d{1,2}\..*"),
        ("Axolotl", "activation_offloading", "hidden_states", "checkpoint_offload", "double_buffer"),
        ("Axolotl", "use_dft_loss", True, "loss_type", "dft"),
        ("LLaMA-Factory", "lora_target", "q_proj,v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ("LLaMA-Factory", "pref_loss", "sigmoid,hinge", "loss_type", ["sigmoid", "hinge"]),
        ("LLaMA-Factory", "include_for_metrics", "loss,  inputs", "include_for_metrics", ["loss", "inputs"]),
        ("Unsloth", "target_modules", "all-linear", "lora_target_modules", "all-linear"),
        ("Unsloth", "include_for_metrics", "loss", "include_for_metrics", ["loss"]),
    ],
)  # fmt: skip
def test_a_list_written_as_text_is_a_list(tool: str, key: str, value: Any, to: str, expected: Any) -> None:
    out = convert(BASES[tool] | ({"stage": "dpo"} if key == "pref_loss" else {}) | {key: value}, Path())
    assert out.values[to] == expected
    arguments.check(out.values, out.method, "a.yaml", out.origins)


@pytest.mark.parametrize(
    ("key", "value", "reads"),
    [
        ("columns", {"prompt": "instruction", "query": "input", "response": "output", "history": ""}, True),
        ("columns", {"prompt": "instruction", "history": "history"}, True),
        ("columns", {"prompt": "input", "response": "output", "system": "instruction"}, False),
        ("columns", {"prompt": "instruction", "kto_tag": "label", "images": "images"}, True),
        ("columns", {"prompt": "instruction", "videos": "videos"}, False),
        ("tags", {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}, True),
        ("tags", {"role_tag": "from", "content_tag": "value", "user_tag": "gpt", "assistant_tag": "human"}, False),
        ("message_property_mappings", {"role": "from", "content": "value"}, True),
        ("message_property_mappings", {"role": "value", "content": "from"}, False),
        ("field_messages", "conversations", True),
        ("field", "text", True),
        ("field", "content", False),
    ],
)  # fmt: skip
def test_columns_and_roles_are_read_as_they_are_under_their_own_key_only(key: str, value: Any, reads: bool) -> None:
    out = convert(BASES["Axolotl"] | {"datasets": [{"path": "x", key: value}]}, Path())
    assert out.notes[f"datasets {key}"][0] == ("dropped safely" if reads else "needs you")


@pytest.mark.parametrize("keys", [("warmup_ratio", "warmup_steps"), ("warmup_steps", "warmup_ratio")])
def test_of_two_keys_for_one_option_none_is_lost(keys: tuple[str, str]) -> None:
    for first, second, taken in ((0.1, 0, 0.1), (0, 0.1, 0.1), (0.1, 5, 0.1), (5, 5, 5)):
        out = convert(BASES["LLaMA-Factory"] | dict(zip(keys, (first, second), strict=True)), Path())
        assert out.values["warmup_steps"] == taken
        needs = [key for key, (group, _) in out.notes.items() if group == "needs you" and key in keys]
        assert needs == ([keys[1]] if (first, second) == (0.1, 5) else [])
    adapters = {"lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    for given in (adapters, dict(reversed(adapters.items()))):
        out = convert(BASES["Axolotl"] | given, Path())
        assert out.notes[[*given][1]][0] == "needs you"


def test_a_table_of_data_sets_that_names_no_data_or_a_sample_needs_the_user(tmp_path: Path) -> None:
    table = {"a": {"script_url": "a"}, "b": {"hf_hub_url": "o/b", "num_samples": 9}, "c": {"hf_hub_url": "o/c"}}
    table["seen"] = {"hf_hub_url": "o/seen", "columns": {"images": "images"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(table), encoding="utf-8")
    out = convert(BASES["LLaMA-Factory"] | {"dataset_dir": str(tmp_path), "dataset": "a, b, c"}, tmp_path)
    needs = {key for key, (group, _) in out.notes.items() if group == "needs you"}
    assert needs == {"dataset a", "dataset b num_samples"}
    assert [entry["path"] for entry in out.values["datasets"]] == ["a", "o/b", "o/c"]
    out = convert(BASES["LLaMA-Factory"] | {"dataset_dir": str(tmp_path), "dataset": "seen"}, tmp_path)
    assert "lora_target_modules" in out.notes["freeze_vision_tower"][1], "its default, which is not done here"
    assert {out.notes[key][0] for key in ("freeze_vision_tower", "media_dir", "dataset seen images")} == {"needs you"}


def test_a_single_target_module_is_trained(tmp_path: Path) -> None:
    from peft import get_peft_model
    from trl import get_peft_config

    out = convert(BASES["LLaMA-Factory"] | {"lora_target": "q_proj", "bf16": False, "use_cpu": True}, Path())
    (file := tmp_path / "one.yaml").write_text(out.text("a", "b"), encoding="utf-8")
    trained = get_peft_model(tiny_model("qwen3"), get_peft_config(arguments.parse(["--config", str(file)]).model))
    adapters = [name for name, weight in trained.named_parameters() if weight.requires_grad]
    assert {name.split(".")[-4] for name in adapters} == {"q_proj"}


HOSTILE = [
    "\nenv:\n  PYTHONPATH: evil\n#", "\r\nenv: {A: b}", "a\x85env: {A: b}", "a\u2028env: {A: b}\u2029", "\tx: y",
    ": a: ", "'\"", "# no comment", "&a *a", "*a", "!!python/object:os.system x", "%YAML 9.9", "---\n...",
    "\x00\x07\x1b[31m\x7f", "\ud800", "\ufeff\ufffe", "$(touch evil) `touch evil` ; rm", "- a\n- b", "{a: [",
    "\u4e2d, b\n", "x" * 10_000, "\U0001f600 \u202e",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:30]))
def test_foreign_text_is_never_structure(text: str, tmp_path: Path) -> None:
    data = {"path": text, text: text, "type": text, "field": text}
    places: dict[str, dict[str, Any]] = {
        "Axolotl": {"wandb_project": text, "plugins": [text], "datasets": [data]},
        "LLaMA-Factory": {"dataset": [text], "dataset_dir": text[:99], "lora_target": text, "pref_loss": [text]},
        "Unsloth": {"output": text, "logging": {text: text}, "report_to": text, "lr_scheduler_kwargs": {"a": text}},
    }  # fmt: skip
    for tool, more in places.items():
        given = BASES[tool] | {text: text, "chat_template": text, "run_name": text, "token": text} | more
        (file := tmp_path / "a.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
        out = convert(load_config(str(file)), tmp_path)
        file.write_text(out.text(text, text), encoding="utf-8")
        assert load_config(str(file)) == out.values
        assert out.values["run_name"] == text
        comments = [line for line in out.text(text, text).split("\n") if line.startswith("#")]
        assert all(printable(line) == line and len(line) < 700 for line in comments)
        assert len(comments) + len(dump(out.values).split("\n")) + 2 == len(out.text(text, text).split("\n"))


NAMES = ["my run.yaml", "it's #1.yaml", "a: &b *c.yaml", "$(touch evil).yaml", "\U0001f469\u200d\U0001f4bb.yaml"]
NO_NAMES = ["a\nenv: {A: b}\n#.yaml", "\x1b[31m.yaml", "a\u2028b.yaml", "\udcff.yaml", "x" * 5000]


@pytest.mark.parametrize("name", [*NAMES, *NO_NAMES], ids=lambda name: ascii(name[:30]))
@pytest.mark.parametrize("words", ["convert theirs.yaml", "init qwen3-8b-lora-8k"])
def test_an_output_of_any_name_is_one_word_of_the_commands_or_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = BASES["Axolotl"] | {"excess_length_strategy": "truncate"}  # nothing needs the user
    Path("theirs.yaml").write_text(yaml.safe_dump(theirs), encoding="utf-8")
    assert main([*words.split(), "--output", name]) == (2 if name in NO_NAMES else 0)
    captured = capsys.readouterr()
    if name in NO_NAMES:
        assert "--output '" in captured.err
        assert printable(captured.err.strip()) == captured.err.strip()
        assert [file.name for file in tmp_path.iterdir()] == ["theirs.yaml"]
        return
    lines = [*captured.out.splitlines(), *Path(name).read_text(encoding="utf-8").splitlines()]
    commands = [line.partition("fastpack-trl sft")[2] for line in lines if re.match("(train:|#    ) fast", line)]
    assert len(commands) > 1
    assert all(shlex.split(command)[:2] == ["--config", name] for command in commands)


@pytest.mark.parametrize("tool", _TOOLS)
@pytest.mark.parametrize(
    ("key", "value"),
    {
        "trust_remote_code": True, "resume_from_checkpoint": "/tmp/a", "resume": "a", "reward_funcs": ["os.system"],
        "env": {"PYTHONPATH": "evil"}, "hub_model_id": "their/model", "model_init_kwargs": {"trust_remote_code": True},
        "push_to_hub": True, "trackio_space_id": "their/space", "hub_token": "hf_secret", "wandb_api_key": "hf_secret",
        "vllm_server_base_url": "http://evil", "report_to": ["wandb"], "wandb_project": "theirs", "enable_wandb": True,
    }.items(),
)  # fmt: skip
def test_what_runs_code_or_sends_data_needs_the_user(tool: str, key: str, value: Any) -> None:
    out = convert(BASES[tool] | {key: value}, Path())
    assert out.notes[key][0] == "needs you"
    assert out.values == convert(BASES[tool], Path()).values
    assert "hf_secret" not in out.text("a", "b")
    assert convert(BASES[tool] | {key: False}, Path()).notes[key][0] == "dropped safely"


def test_data_in_pickles_need_the_user() -> None:
    entries = [{"path": "pandas", "data_files": "a.pkl"}, {"path": "b.jsonl"}]
    out = convert(BASES["Axolotl"] | {"datasets": entries}, Path())
    assert out.values["datasets"] == [{"path": "b.jsonl"}]
    assert out.notes["datasets path"][0] == "needs you"


WRONG = [5, 1.5, True, "a, b", [4], [[1]], {"a": 1}, [{}], date(2024, 1, 2), b"x", {1, 2}, "\n\x00", float("nan")]
OTHERS = "datasets rl num_epochs evals_per_epoch saves_per_epoch train_on_inputs learning_rate load_in_4bit plugins"
OTHERS += " lora report_to dataset dataset_dir stage max_samples lora_alpha special_tokens training lr_scheduler_kwargs"
OTHERS += " seed"


@pytest.mark.parametrize("tool", _TOOLS)
def test_a_value_of_wrong_type_is_one_line_or_one_the_parser_takes(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "make_parser", cache(arguments.make_parser))
    monkeypatch.setattr(arguments, "_launch_parser", cache(arguments._launch_parser))
    refused = 0
    for key, value in islice(product([*_KEYS[tool], *_KEYS["any tool"], *OTHERS.split()], WRONG), None, None, 3):
        try:
            out = convert(BASES[tool] | {key: value}, Path())
            arguments.check(out.values, out.method, "theirs.yaml", out.origins)
            assert not any(isinstance(one, bytes | set) for one in out.values.values())
        except UserError as error:
            refused += key in str(error)
    assert refused > 30


LISTS = "a0: &a0 [x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
BOMBS = {
    "mapping": "lr_scheduler_kwargs:\n  " + LISTS.replace("\n", "\n  "),
    "sequence": "report_to:\n" + "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9 * bool(i))}]\n" for i in range(9)),
    "merge": LISTS.replace("[x, x, x]", "{k: 1}").replace("[*", "{<<: [*").replace("]\n", "]}\n"),
    "key": LISTS + "? *a8\n: 1\n",
    "itself": "model_init_kwargs: &a {b: *a}\n",
    "each other": "a: &a [&b {c: *a}, *b]\n",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_aliases_that_expand_without_bounds_are_refused_at_once(bomb: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text(BOMBS[bomb], encoding="utf-8")
    with pytest.raises(UserError, match=r"line \d+, .* values, aliases expanded, or an alias to itself: write"):
        load_config(str(file))


def test_aliases_and_merges_of_people_are_read(tmp_path: Path) -> None:
    text = "a: &a {x: [1, 2], y: &y z}\nb: {<<: *a, y: 2}\nc: [*a, *y]\n*y : " + json.dumps(["v"] * 2000)
    (file := tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert load_config(str(file)) == yaml.safe_load(text)


@pytest.mark.parametrize("name", ["train.py", "train.ipynb", "train.sh"])
def test_only_yaml_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text('{"cells": []}', encoding="utf-8")
    assert main(["convert", str(tmp_path / name)]) == 2
    assert "only YAML is read; for a script see From Unsloth in docs/migrating.md" in capsys.readouterr().err


@pytest.mark.parametrize("info", ["[", "[]", '{"x": 5}', '{"x": {"file_name": 5}}', '{"x": [1]}', "[" * 9999])
def test_a_damaged_table_of_data_sets_is_one_line(info: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(info, encoding="utf-8")
    with pytest.raises(UserError, match=r"dataset='x': dataset_info.json has no such entry"):
        convert(BASES["LLaMA-Factory"] | {"dataset_dir": str(tmp_path)}, tmp_path)
