"""Whatever is wrong with the input of ``fastpack-trl sft``: one line, the value, the remedy, and nothing written.

What goes wrong at first contact is in `tests/test_misuses.py`; here is the rest.
"""

from __future__ import annotations

import json

import pytest
from sft_material import TEXT_ROWS, Material, make_tokenizer, refused, save_model, write_jsonl

from fastpack_trl.cli.main import main

YAML_TEXT = [
    # Names
    ("num_proceses: 2", ["'num_proceses'", "did you mean 'num_processes'?"]),
    ("learning-rate: 1", ["'learning-rate'", "did you mean 'learning_rate'?"]),
    ("qqq: 1", ["unknown key 'qqq'", "fastpack-trl sft --help"]),
    ("config: other.yaml", ["unknown key 'config'"]),
    # Values
    ("max_length: 10.5", ["max_length", "10.5 is not an integer", "default: 1024"]),
    ("packing: maybe", ["packing", "'maybe' is not true or false"]),
    ("learning_rate: fast", ["learning_rate", "'fast' is not a number", "default: 2e-05"]),
    ("learning_rate:", ["learning_rate", "None is not a number"]),
    ("learning_rate: .inf\nmax_steps: .inf", ["max_steps", "inf is not an integer"]),
    ("run_name: {a: 1}", ["run_name", "{'a': 1} is not text"]),
    ("dataset_text_field: [a, b]", ["dataset_text_field", "['a', 'b'] is not text"]),
    ("packing_strategy: bdf", ["packing_strategy", "'bdf' is not one of", "did you mean 'bfd'?"]),
    ("per_device_train_batch_size: 0", ["per_device_train_batch_size=0 is below 1", "rows per device"]),
    ("gradient_accumulation_steps: 0", ["gradient_accumulation_steps=0 is below 1"]),
    ("per_device_eval_batch_size: 0\neval_strategy: epoch", ["per_device_eval_batch_size=0 is below 1"]),
    ("eval_accumulation_steps: 0\neval_strategy: epoch", ["eval_accumulation_steps=0 is below 1", "None"]),
    ("lora_target_modules: [5]", ["lora_target_modules", "[5] is not a list of names"]),
    ("optim: adamw_tourch", ["optim", "'adamw_tourch' is not one of its choices; did you mean 'adamw_torch'?"]),
    ("accelerator_config: '{a: 1}'", ["--accelerator_config", "is not JSON"]),
    ("model_init_kwargs: 5", ["model_init_kwargs", "5 is not text or a mapping"]),
    ("model_init_kwargs: sdpa", ["model_init_kwargs", "'sdpa' is not JSON"]),
    ("model_init_kwargs: {atn_implementation: sdpa}", ["model_init_kwargs", "'atn_implementation'"]),
    ("model_init_kwargs: {quantization_config: {quant_method: mxfp5}}", ["quantization_config", "mxfp5"]),
    ("load_in_4bit: true\nload_in_8bit: true", ["4 bit", "8 bit"]),
    (
        "use_peft: true\nlora_target_modules: [nowhere]",
        ["lora_target_modules 'nowhere'", "it has down_proj", "all-linear"],
    ),
    ("use_peft: true\nlora_target_modules: [q_prj, v_prj]", ["['q_prj', 'v_prj']", "did you mean 'q_proj' 'v_proj'?"]),
    ("use_peft: true\nlora_target_modules: [here, there]", ["lora_target_modules ['here', 'there']", "all-linear"]),
    ("accelerator_config: {splt_batches: true}", ["accelerator_config: unknown key 'splt_batches'"]),
    ("lr_scheduler_kwargs: {cycles: 2}", ["lr_scheduler_kwargs: unknown key 'cycles'"]),
    ("optim_args: fused", ["optim_args 'fused' is not a list of names and values", "fused=True"]),
    ("pad_to_multiple_of: 0", ["pad_to_multiple_of=0 is below 1"]),
    ("eval_on_start: true", ["eval_on_start", "set eval_strategy"]),
    # Launching
    ("num_processes: [2]", ["num_processes", "[2] is not a single value"]),
    ("multi_gpu: perhaps", ["multi_gpu", "'perhaps' is not true or false"]),
    ("num_processes: 0", ["num_processes 0 is below 1", "leave it out"]),
    ("num_processes: two", ["num_processes", "'two'"]),
    ("env: 3", ["env", "3 is not a mapping"]),
    ("env: {A: [1]}", ["env", "is not a mapping"]),
    # Data
    ("dataset_name: ~/absent-folder", ["data '~/absent-folder' does not exist"]),
    ("dataset_name: owner/absent", ["data 'owner/absent' cannot be loaded", "nor is there a file or folder"]),
    ("dataset_name: data/absent/train", ["data 'data/absent/train' does not exist", "working directory"]),
    ("dataset_name: 'data\\train'", ["does not exist", "working directory"]),
    ("dataset_name: absent-*.jsonl", ["no file matches 'absent-*.jsonl'", "correct the pattern"]),
    ("dataset_name: s3://a/b.csv", ["'s3://a/b.csv' is a URL", "`datasets: [{path: csv, data_files: s3://a/b.csv}]`"]),
    ("dataset_name:", ["no data: set dataset_name", "datasets"]),
    ("datasets: data.jsonl", ["datasets", "'data.jsonl' is not a list"]),
    ("datasets: [{path: absent.csv}]", ["data 'absent.csv' does not exist"]),
    ("datasets: [{pth: data.csv}]", ["unknown key 'pth'", "did you mean 'path'?"]),
    ("datasets: [{split: train}]", ["has no path"]),
    ("datasets: [{path: json, data_files: 5}]", ["datasets: data_files", "5 is not text"]),
    ("eval_strategy: steps\neval_steps: 1", ["dataset_test_split='test'", "it has: train", "eval_strategy to 'no'"]),
    ("dataset_streaming: true\nmax_steps: -1", ["set max_steps"]),
    ("assistant_only_loss: true", ["assistant_only_loss"]),
    # Model
    ("model_name_or_path: owner/absent", ["model_name_or_path 'owner/absent' cannot be used"]),
    (
        "attn_implementation: flash_atention_2",
        ["'flash_atention_2' does not exist", "did you mean 'flash_attention_2'?"],
    ),
    ("attn_implementation: flash_attention_2", ["'flash_attention_2'", "flash_attn", "not installed"]),
    ("pad_token: <nowhere>", ["pad_token '<nowhere>'", "vocabulary"]),
    ("eos_token: <end>", ["eos_token '<end>'", "special tokens: <eos>, <pad>"]),
    ("chat_template_path: ./absent.jinja", ["chat_template_path './absent.jinja' does not exist"]),
    ("resume_from_checkpoint: ./absent", ["resume_from_checkpoint './absent' is not a folder"]),
]


@pytest.mark.parametrize(("text", "parts"), YAML_TEXT, ids=[text for text, _ in YAML_TEXT])
def test_yaml_value(material: Material, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]) -> None:
    keys = {line.partition(":")[0]: ... for line in text.splitlines()}
    if "datasets" in keys:
        keys["dataset_name"] = ...
    line = refused(material, capsys, "--config", material.yaml(text=text + "\n", **keys))
    assert all(part in line for part in parts), line


FLAGS = [
    (["--max-lenght=64"], ["unknown option '--max-lenght'", "did you mean '--max-length'?"]),
    (["--num_proceses", "2"], ["'--num_proceses'", "did you mean '--num_processes'?"]),
    (["--packing", "maybe"], ["--packing", "maybe", "true"]),
    (["--dtype", "float17"], ["--dtype", "'float17'", "float16"]),
    (["--max_st", "3"], ["unknown option '--max_st'", "did you mean '--max_steps'?"]),
    (["--model_init_kwargs", "{a: 1}"], ["--model_init_kwargs", "'{a: 1}' is not JSON"]),
    (["--module", "x"], ["unknown option '--module'"]),
]


@pytest.mark.parametrize(("flags", "parts"), FLAGS, ids=[" ".join(flags) for flags, _ in FLAGS])
def test_flag(material: Material, capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]) -> None:
    line = refused(material, capsys, "--config", material.yaml(), *flags)
    assert all(part in line for part in parts), line


CONFIGS: list[tuple[str, bytes, list[str]]] = [
    ("empty", b"", ["is empty", "YAML mapping"]),
    ("a list", b"- a\n- b\n", ["holds a list", "YAML mapping"]),
    ("a syntax error", b"max_length: 64\npacking: [true\nmax_steps: 3\n", ["line 3, column", "correct the YAML"]),
    ("a tab", b"env:\n\tA: 1\n", ["line 2, column 1"]),
    ("a python object", b"run_name: !!python/object/apply:os.getcwd []\n", ["line 1", "python/object/apply:os.getcwd"]),
    ("a key twice, deeper", b"env: {A: 1, B: 2, A: 1}\n", ["line 1, column 19", "'A' is given a second time"]),
    ("not text", b"\xff\xfe\x00", ["cannot be read as UTF-8"]),
]


@pytest.mark.parametrize(("content", "parts"), [row[1:] for row in CONFIGS], ids=[row[0] for row in CONFIGS])
def test_config_file_that_holds(
    material: Material, capsys: pytest.CaptureFixture[str], content: bytes, parts: list[str]
) -> None:
    path = material.folder / "sft.yaml"
    path.write_bytes(content)
    line = refused(material, capsys, "--config", path)
    assert all(part in line for part in [*parts, str(path)]), line


def test_config_file_missing_or_not_named(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder: it holds no YAML" in refused(material, capsys, "--config", material.folder)
    assert "no data: set dataset_name" in refused(material, capsys, "--output_dir", material.out, "--bf16", "false")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("data.jsonl", "", ["is empty"]),
        ("data", None, ["cannot be loaded", "it holds no data files: put files with rows (.json, .jsonl"]),
        ("data.csv", "text\n", ["it holds no rows: put files with rows"]),
        ("data.xlsx", "x", ["no known suffix", ".jsonl"]),
    ],
)
def test_data(
    material: Material, capsys: pytest.CaptureFixture[str], name: str, content: str | None, parts: list[str]
) -> None:
    data = material.folder / name
    if content is None:
        data.mkdir()
    else:
        data.write_text(content, encoding="utf-8")
    line = refused(material, capsys, "--config", material.yaml(dataset_name=str(data)))
    assert all(part in line for part in [*parts, str(data)]), line


def config(model_type: str, *architectures: str) -> dict[str, str]:
    return {"config.json": json.dumps({"model_type": model_type, "architectures": architectures or None})}


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (config("bert", "BertForMaskedLM"), ["BertForMaskedLM", "'bert'", "causal language model"]),
        (config("t5", "T5ForConditionalGeneration"), ["T5ForConditionalGeneration", "'t5'", "causal language model"]),
        (config("qwen3", "Qwen3Model"), ["Qwen3Model", "causal language model"]),
        (config("qwen3", "Qwen3ForSequenceClassification"), ["Qwen3ForSequenceClassification", "causal language"]),
        (config("qwen99"), ["cannot be used", "qwen99"]),
        ({"adapter_config.json": "{}"}, ["PEFT adapter", "base model"]),
        ({}, ["has no config.json", "hub name"]),
    ],
)
def test_folder_that_holds_no_causal_model(
    material: Material, capsys: pytest.CaptureFixture[str], files: dict[str, str], parts: list[str]
) -> None:
    folder = material.folder / "other"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    line = refused(material, capsys, "--config", material.yaml(model_name_or_path=str(folder)))
    assert all(part in line for part in [*parts, str(folder)]), line


# Files of a saved model -> what is in them instead: None for no file, nothing for all but its last bytes.
WEIGHTS = "model.safetensors"
DAMAGES: dict[str, tuple[dict[str, bytes | None], list[str]]] = {
    "no weights": ({WEIGHTS: None}, ["model_name_or_path", "it holds no weights, such as model.safetensors"]),
    "cut weights": ({WEIGHTS: b""}, ["model.safetensors is damaged (Safe", "copy or download it again"]),
    "no tokenizer": (
        {"tokenizer.json": None, "tokenizer_config.json": None, "chat_template.jinja": None},
        ["gives no tokens for any text", "vocabulary of 1"],
    ),
    "no pad token": ({}, ["no padding token", "set pad_token"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_model_with(material: Material, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    changes, parts = DAMAGES[damage]
    tokenizer = None if changes else make_tokenizer()
    folder = save_model(material.folder / "other", tokenizer=tokenizer)
    for name, content in changes.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content or (folder / name).read_bytes()[:-100])
    line = refused(material, capsys, "--config", material.yaml(model_name_or_path=str(folder)))
    assert all(part in line for part in [*parts, str(folder)]), line


def test_conversations_without_a_chat_template(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(material.folder / "other", tokenizer=make_tokenizer(eos_token="<eos>"))
    data = write_jsonl(material.folder / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 4)
    path = material.yaml(model_name_or_path=str(model), dataset_name=str(data))
    assert "set chat_template_path" in refused(material, capsys, "--config", path)


@pytest.mark.parametrize(
    ("template", "part"),
    [("{{ raise_exception('users alone') }}", "users alone"), ("{% for", "template"), ("{{ a.b.c }}", "undefined")],
)
def test_a_chat_template_that_cannot_render(
    material: Material, capsys: pytest.CaptureFixture[str], template: str, part: str
) -> None:
    file = material.folder / "chat.jinja"
    file.write_text(template, encoding="utf-8")
    data = write_jsonl(material.folder / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 4)
    path = material.yaml(chat_template_path=str(file), dataset_name=str(data))
    line = refused(material, capsys, "--config", path)
    parts = [f"data {str(data)!r}: the chat template cannot render row 0", part, "chat_template_path"]
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("below", ["", "run/1"])
def test_output_dir_that_is_a_file(material: Material, capsys: pytest.CaptureFixture[str], below: str) -> None:
    file = write_jsonl(material.folder / "taken", TEXT_ROWS[:1])
    line = refused(material, capsys, "--config", material.yaml(), "--output_dir", file / below)
    assert f"nothing can be written in {str(file)!r} (the system says: Not a directory)" in line


def test_launch_flags_under_a_launcher(
    material: Material, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    line = refused(material, capsys, "--config", material.yaml(), "--num_processes", "4")
    assert "--num_processes 4" in line
    assert "give them to the launcher" in line


def test_train_launches_nothing(material: Material) -> None:
    from fastpack_trl.errors import UserError
    from fastpack_trl.recipe.train import train

    with pytest.raises(UserError, match="--num_processes 4"):
        train(["--config", str(material.yaml()), "--num_processes", "4"])


def test_traceback_shows_where_a_line_comes_from(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--config", str(material.yaml()), "--max_length", "abc", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
