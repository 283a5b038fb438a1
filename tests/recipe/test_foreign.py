"""YAMLs of other tools in their documented form: recognised, converted with every key accounted for, and trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from sft_material import Material, refused, write_jsonl

from fastpack_trl.cli.main import main
from fastpack_trl.errors import DataError, UserError
from fastpack_trl.recipe.arguments import as_flags
from fastpack_trl.recipe.foreign import convert, tool_of
from fastpack_trl.recipe.formats import reshape
from fastpack_trl.recipe.methods import METHODS

AXOLOTL_QLORA = """
base_model: {model}; load_in_8bit: false; load_in_4bit: true; datasets: [{{path: {alpaca}, type: alpaca}}]
dataset_prepared_path: last_run_prepared; val_set_size: 0.1; output_dir: {out}; adapter: qlora; sequence_len: 64
sample_packing: true; eval_sample_packing: true; pad_to_sequence_len: true; lora_r: 4; lora_alpha: 16
lora_target_linear: true; gradient_accumulation_steps: 2; micro_batch_size: 2; num_epochs: 1; optimizer: adamw_torch
lr_scheduler: linear; learning_rate: 0.0002; train_on_inputs: false; bf16: auto; gradient_checkpointing: true
flash_attention: true; warmup_ratio: 0.1; evals_per_epoch: 4; saves_per_epoch: 1; special_tokens: {{pad_token: <pad>}}
"""
AXOLOTL_FULL = """
base_model: {model}; datasets: [{{path: {sharegpt}, type: sharegpt}}]; output_dir: {out}; sequence_len: 64
sample_packing: true; train_on_inputs: true; micro_batch_size: 2; num_epochs: 1; max_steps: 2; lr_scheduler: constant
learning_rate: 2e-5; plugins: [axolotl.integrations.liger.LigerPlugin]; attn_implementation: flash_attention_2
"""
FACTORY_LORA = """
model_name_or_path: {model}; trust_remote_code: true; stage: sft; do_train: true; finetuning_type: lora; lora_rank: 4
lora_target: q_proj,v_proj; dataset: identity; dataset_dir: {folder}; template: llama3; cutoff_len: 64; max_samples: 10
preprocessing_num_workers: 1; output_dir: {out}; save_steps: 500; per_device_train_batch_size: 1
gradient_accumulation_steps: 2; learning_rate: 1.0e-4; num_train_epochs: 1.0; lr_scheduler_type: cosine
warmup_ratio: 0.1; bf16: false
"""
FACTORY_DPO = """
model_name_or_path: {model}; stage: dpo; do_train: true; finetuning_type: lora; lora_target: all; pref_beta: 0.2
pref_loss: sigmoid; dataset: preferences; dataset_dir: {folder}; template: llama3; cutoff_len: 64; output_dir: {out}
per_device_train_batch_size: 2; learning_rate: 5.0e-6; max_steps: 2
"""
UNSLOTH = """
model: {{model_name: {model}, max_seq_length: 64, load_in_4bit: false}}
lora: {{r: 4, lora_alpha: 4, target_modules: [q_proj, v_proj], use_gradient_checkpointing: unsloth, random_state: 3407}}
training: {{dataset: {text}, output_dir: {out}, max_steps: 2, per_device_train_batch_size: 2, learning_rate: 2e-4}}
"""
RECIPES = {
    "axolotl-qlora": (AXOLOTL_QLORA, "Axolotl", "sft"),
    "axolotl-full": (AXOLOTL_FULL, "Axolotl", "sft"),
    "llama-factory-lora": (FACTORY_LORA, "LLaMA-Factory", "sft"),
    "llama-factory-dpo": (FACTORY_DPO, "LLaMA-Factory", "dpo"),
    "unsloth": (UNSLOTH, "Unsloth", "sft"),
}
TURNS = [{"from": "human", "value": "the quick"}, {"from": "gpt", "value": "brown fox"}]
MESSAGES = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]


@pytest.fixture
def files(material: Material, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Path]:
    """Data of every form, and what the recipes name."""
    monkeypatch.chdir(material.folder)
    rows: Mapping[str, Mapping[str, object]] = {
        "alpaca": {"instruction": "the quick", "input": "brown", "output": "fox jumps"},
        "sharegpt": {"conversations": TURNS},
        "preferences": {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "dog"}},
    }
    made = {name: write_jsonl(material.folder / f"{name}.jsonl", [row] * 24) for name, row in rows.items()}
    info = {
        "identity": {"file_name": "alpaca.jsonl"},
        "preferences": {"file_name": "preferences.jsonl", "formatting": "sharegpt", "ranking": True},
    }
    (material.folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return {**made, "model": material.model, "text": material.data, "out": material.out, "folder": material.folder}


def text_of(name: str, files: Mapping[str, Path]) -> str:
    return RECIPES[name][0].replace("; ", "\n").format(**files)


def written(name: str, files: Mapping[str, Path]) -> Path:
    path = files["folder"] / f"{name}.yml"
    path.write_text(text_of(name, files), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_refused_with_the_command_that_converts_it_and_then_trains(
    name: str, files: Mapping[str, Path], material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    if "qlora" in name:
        pytest.importorskip("bitsandbytes")
    path, (_, tool, command) = written(name, files), RECIPES[name]
    said = refused(material, capsys, "--config", path, command=command)
    assert f"is a config of {tool}: `fastpack-trl convert {path}` translates it" in said
    assert main(["convert", str(path)]) == 0
    output = files["folder"] / f"{name}-fastpack.yaml"
    said = capsys.readouterr().out
    assert f"train: fastpack-trl {command} --config {output.name}" in said
    assert ("settle what needs you in" in said) == ("needs you (" in said)
    short = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "warmup_steps": 0}
    words = as_flags(short | {"use_cpu": True, "bf16": False})
    words += ["--load_in_4bit", "False"] if "qlora" in name else []  # a tiny model of 304 tokens has no blocks of 64
    words += ["--assistant_only_loss", "False"] if command == "sft" else []
    assert main([command, "--config", str(output), *words]) == 0
    assert "Training completed." in capsys.readouterr().out


PART = {"stage", "rl", "finetuning_type", "train_on_inputs", "dataset_dir", "max_samples", "num_epochs"}
"""Keys that only decide how others are converted."""


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_is_a_value_or_has_a_note(name: str, files: Mapping[str, Path]) -> None:
    given = yaml.safe_load(text_of(name, files))
    assert tool_of(given) == RECIPES[name][1]
    whole = convert(given, files["folder"])
    assert whole.method is METHODS[RECIPES[name][2]]
    assert whole.values["model_name_or_path"] == str(files["model"])
    assert whole.values["max_length"] == 64
    for key, value in given.items():
        if value in (None, "auto") or key in PART or isinstance(value, dict):
            continue
        try:
            without = convert({other: each for other, each in given.items() if other != key}, files["folder"])
        except UserError:
            continue  # it says which tool this is
        same = (without.values, without.notes) == (whole.values, whole.notes)
        assert not same or key in ("evals_per_epoch", "eval_sample_packing", "lora_target", "load_in_4bit"), key


def test_values_keep_their_meaning(files: Mapping[str, Path]) -> None:
    def values(name: str) -> dict[str, Any]:
        return convert(yaml.safe_load(text_of(name, files)), files["folder"]).values

    alpaca, lora = {"path": str(files["alpaca"])}, {"use_peft": True, "lora_dropout": 0.0}
    expected: dict[str, dict[str, Any]] = {
        "axolotl-qlora": lora | {
            "load_in_4bit": True, "lora_target_modules": "all-linear", "eval_strategy": "steps", "eval_steps": 0.25,
            "save_strategy": "epoch", "test_split_size": 0.1, "pad_token": "<pad>", "datasets": [alpaca],
            "dataset_format": "alpaca", "warmup_steps": 0.1, "lr_scheduler_type": "linear",
        },
        "llama-factory-lora": lora | {
            "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"],
            "datasets": [alpaca | {"split": "train[:10]"}],
        },
        "llama-factory-dpo": lora | {
            "beta": 0.2, "loss_type": ["sigmoid"], "lora_r": 8, "lora_target_modules": "all-linear",
            "dataset_format": "sharegpt",
        },
        "unsloth": lora | {"seed": 3407, "lora_r": 4},
    }  # fmt: skip
    for name, some in expected.items():
        found = values(name)
        assert {key: found.get(key) for key in some} == some
    assert "assistant_only_loss" not in values("axolotl-full"), "train_on_inputs: true"
    axolotl, factory = {"base_model": "a", "adapter": "lora"}, {"model_name_or_path": "a", "stage": "sft"}
    found = convert(axolotl, files["folder"]).values
    defaults = ("num_train_epochs", "per_device_train_batch_size", "max_length", "lr_scheduler_type")
    assert [found[name] for name in defaults] == [1, 1, 512, "cosine"]
    found = convert(factory | {"quantization_bit": 4}, files["folder"]).values
    defaults = ("max_length", "use_bnb_nested_quant", "learning_rate")
    assert [found[name] for name in defaults] == [2048, True, 5e-5]
    raw = convert(factory | {"stage": "pt", "cutoff_len": 9, "dataset": "identity"}, files["folder"]).values
    assert (raw["packing"], "dataset_format" in raw) == (True, False)
    whole = convert(factory | {"cutoff_len": 9, "finetuning_type": "full"}, files["folder"]).values
    assert not [name for name in whole if name.startswith("lora_")]
    data = {"datasets": [{"path": "a", "type": "chat_template.default"}]}
    pairs = convert(axolotl | data | {"rl": "dpo"}, files["folder"])
    assert pairs.values["dataset_format"] == "sharegpt"
    assert convert(axolotl | {"reward_model": True}, files["folder"]).method is METHODS["reward"]
    for more, steps in (({}, 0.03), ({"warmup_steps": 0}, 0), ({"warmup_ratio": 0.2}, 0.2)):
        assert convert(axolotl | more, files["folder"]).values["warmup_steps"] == steps
    scripts = {"model_name": "m", "max_seq_length": 9, "dataset": "x", "format_type": "alpaca"}
    unsloth = convert(scripts, files["folder"])
    assert unsloth.values["completion_only_loss"] is False
    assert "learning_rate" in unsloth.notes["defaults"][1]
    ipo = convert({"base_model": "a", "sequence_len": 9, "rl": "ipo"}, files["folder"])
    assert (ipo.method, ipo.values["loss_type"]) == (METHODS["dpo"], ["ipo"])


def rows_of(row: Mapping[str, object], wanted: str, command: str = "sft") -> list[dict[str, Any]]:
    return list(reshape(Dataset.from_list([dict(row)] * 2), "train", wanted, command))


def test_alpaca_becomes_prompt_and_completion_and_sharegpt_messages() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief", "history": [["hi", "hello"]]}
    (first, _) = rows_of(row, "alpaca")
    assert [turn["role"] for turn in first["prompt"]] == ["system", "user", "assistant", "user"]
    assert first["prompt"][-1]["content"] == "add\n1 2"
    assert first["completion"] == [{"role": "assistant", "content": "3"}]
    assert first.keys() == {"prompt", "completion"}
    (plain, _) = rows_of({"instruction": "add", "input": "", "output": "3"}, "alpaca")
    assert plain["prompt"] == [{"role": "user", "content": "add"}]
    assert rows_of({"conversations": TURNS}, "sharegpt")[0] == {"messages": MESSAGES}
    kept = {"images": ["cat.png"], "tools": "[]"}
    assert rows_of({"conversations": TURNS, "id": 1, **kept}, "sharegpt")[0] == {"messages": MESSAGES, **kept}
    for turns in (None, []):
        with pytest.raises(ValueError, match=r"a row has (None|\[\]) instead of turns: drop it"):
            list(reshape(Dataset.from_list([{"conversations": TURNS}, {"conversations": turns}]), "train", "sharegpt"))
    pair = {"conversations": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}
    assert rows_of(pair, "sharegpt")[0]["chosen"] == MESSAGES[1:]
    (number, _) = rows_of({"instruction": "double", "input": 0, "output": 0}, "alpaca")
    assert number == {
        "prompt": [{"role": "user", "content": "double\n0"}],
        "completion": [{**MESSAGES[1], "content": "0"}],
    }
    marked = [{"from": "human", "value": "<image> what?"}, TURNS[1]]
    assert rows_of({"conversations": marked}, "sharegpt")
    with pytest.raises(ValueError, match="holds '<image>' as text: remove it"):
        rows_of({"conversations": marked, **kept}, "sharegpt")


def test_each_method_gets_the_columns_that_it_reads() -> None:
    alpaca = {"instruction": "add", "chosen": "3", "rejected": "4"}
    answers = [[{"role": "assistant", "content": text}] for text in "34"]
    prompt = [{"role": "user", "content": "add"}]
    for command in ("dpo", "reward"):
        made = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
        assert rows_of(alpaca, "alpaca", command)[0] == made
    assert rows_of({**alpaca, "margin": 0.5}, "alpaca", "reward")[0]["margin"] == 0.5
    reasons = {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": [{**MESSAGES[1], "content": "dog"}]}
    whole = {"messages": MESSAGES, "chosen": MESSAGES, "rejected": [MESSAGES[0], *reasons["rejected"]]}
    for row in (whole, {**whole, "messages": MESSAGES[:1], "chosen": MESSAGES[1], "rejected": "dog"}):
        assert rows_of(row, "sharegpt", "dpo")[0] == reasons, "the prompt counts once"
    split = {"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "label": True}
    assert rows_of({"conversations": TURNS, "label": True}, "sharegpt", "kto")[0] == split
    judged = {"instruction": "add", "output": "3", "label": True, "chosen": "3", "rejected": "4"}
    (made, _) = rows_of(judged, "alpaca", "kto")
    assert made == {"prompt": prompt, "completion": answers[0], "label": True}
    with pytest.raises(DataError, match="needs output"):
        rows_of({"instruction": "add", "label": True, "chosen": "3", "rejected": "4"}, "alpaca", "kto")
    solved = {"instruction": "add", "output": "3", "solution": "3"}
    assert rows_of(solved, "alpaca", "grpo")[0] == solved | {"prompt": prompt}, "rewards may read all columns"
    for turns in (TURNS, TURNS[:1]):
        assert rows_of({"conversations": turns}, "sharegpt", "rloo")[0]["prompt"] == MESSAGES[:1]


def test_turns_keep_their_calls_and_what_would_train_otherwise_is_an_error() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1}]
    (made, _) = rows_of({"messages": turns}, "sharegpt")
    last = {key: value for key, value in made["messages"][1].items() if value is not None}
    assert last == {"role": "assistant", "content": "", "tool_calls": [call]}
    (first, _) = rows_of({"system": "a", "conversations": [{"from": "system", "value": "b"}, *TURNS]}, "sharegpt")
    assert [turn["content"] for turn in first["messages"]] == ["b", "the quick", "brown fox"]
    rare = [{"messages": MESSAGES}] * 1001 + [{"messages": [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "hm"}]}]
    kept = reshape(Dataset.from_list(rare), "train", "sharegpt")[-1]["messages"][1]
    assert kept["reasoning_content"] == "hm", "the first thousand rows do not decide which keys there are"
    pair = {"conversations": TURNS, "chosen": TURNS[1], "rejected": TURNS[1]}
    asked = {"instruction": "add", "output": None}
    for wanted, command, row, says in (
        ("sharegpt", "dpo", pair, "are no prompt and two answers"),
        ("sharegpt", "kto", {"conversations": TURNS[:1], "label": True}, "does not end with an answer"),
        ("alpaca", "sft", asked, "a row has no answer"),
        ("alpaca", "sft", {**asked, "output": ["b"]}, "instead of turns"),
        ("alpaca", "sft", {**asked, "history": [["x"]]}, "no pair of a request and its answer"),
        ("sharegpt", "sft", {"conversations": [{"from": ["x"], "value": "a"}]}, "unknown role"),
    ):
        with pytest.raises(DataError, match=says):
            rows_of(row, wanted, command)
    for row, says in (
        ({"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0}]}, "a turn has weight 0"),
        ({"conversations": [TURNS[0], {"from": "function_call", "value": "{}"}]}, "unknown role 'function_call'"),
        ({"conversations": TURNS, "videos": ["a.mp4"]}, "a row has videos or audios"),
    ):
        with pytest.raises(DataError, match=says):
            rows_of(row, "sharegpt")


def test_a_named_format_trains_also_streamed(files: Mapping[str, Path], material: Material) -> None:
    for name in ("alpaca", "sharegpt"):
        path = material.yaml(dataset_name=str(files[name]), dataset_streaming=True, max_steps=1)
        assert main(["sft", "--config", str(path), "--dataset_format", name]) == 0
    kto = [{"conversations": TURNS, "label": bool(number % 2)} for number in range(8)]
    dpo = [{"instruction": "the quick", "chosen": "brown fox", "rejected": "dog"}] * 8
    for command, wanted, rows in (("kto", "sharegpt", kto), ("dpo", "alpaca", dpo)):
        data = write_jsonl(material.folder / f"{command}.jsonl", rows)
        words = ["--model_name_or_path", str(material.model), "--dataset_name", str(data), "--dataset_format", wanted]
        words += as_flags(
            {"output_dir": str(material.out), "max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
        )
        assert main([command, *words]) == 0


def test_a_wrong_format_names_its_columns_and_roles(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    says = "dataset_format=alpaca needs instruction and output, but the train data set has the columns text: leave"
    assert says in refused(material, capsys, "--config", material.yaml(dataset_format="alpaca"))
    write_jsonl(material.folder / "rows.jsonl", [{"conversations": [{"from": "narrator", "value": "a"}]}])
    path = material.yaml(dataset_name=str(material.folder / "rows.jsonl"), dataset_format="sharegpt")
    assert "unknown role 'narrator': rename it to one of human" in refused(material, capsys, "--config", path)
