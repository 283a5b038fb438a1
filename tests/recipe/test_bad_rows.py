"""Rows that cannot be trained on: the data set, the row and the remedy, in Python and from the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from sft_material import Material, refused, write_jsonl
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.errors import DataError
from fastpack_trl.recipe.methods import METHODS

TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
TEXT = {"text": "the quick brown fox"}
PAIR = {"prompt": "the quick", "completion": " fox"}

Rows = list[dict[str, Any]]
BAD: list[tuple[str, Rows, list[str]]] = [
    ("a mapping after text", [TEXT, {"text": {"a": "{0}"}}], ["row 1", "{'text': {'a': '{0}'}}"]),
    ("nothing after text", [TEXT, TEXT, {"text": None}], ["row 2", "{'text': None}"]),
    ("one integer completion", [PAIR, {**PAIR, "completion": 5}], ["row 1", "'completion': 5"]),
    ("empty messages", [{"messages": TURNS}, {"messages": []}], ["row 1", "[]"]),
    ("text for messages", [{"messages": TURNS}, {"messages": "hello"}], ["row 1", "'hello'"]),
    ("text for tokens", [{"input_ids": "abc"}], ["row 0", "'input_ids' of type str"]),
    ("fractions for tokens", [{"input_ids": [1.5]}], ["row 0", "'input_ids' of type ndarray (float32"]),
    ("too few labels", [{"input_ids": [5, 6], "labels": [5]}], ["row 0", "1 labels for 2 input_ids"]),
    ("no counted token", [{"input_ids": [5, 6], "labels": [-100, -100]}], ["all labels are -100"]),
    ("a prompt over max_length", [{"prompt": "a b c " * 99, "completion": "d"}], ["max_length=64 cuts", "raise"]),
]
IDS = [name for name, _, _ in BAD]


def read(file: Path) -> Any:
    """As `datasets` reads them, which is how rows of several types come about."""
    return load_dataset("json", data_files=str(file), cache_dir=str(file.parent))["train"]


def train(trainer_class: type[SFTTrainer], material: Material, dataset: Any) -> None:
    short: dict[str, Any] = {"max_steps": 1, "max_length": 64, "report_to": [], "save_strategy": "no"}
    args = SFTConfig(output_dir=str(material.out), use_cpu=True, bf16=False, **short)
    trainer_class(model=str(material.model), args=args, train_dataset=dataset).train()


@pytest.mark.parametrize(("rows", "parts"), [row[1:] for row in BAD], ids=IDS)
def test_bad_rows_are_value_errors_and_fail_in_stock(material: Material, rows: Rows, parts: list[str]) -> None:
    dataset = read(write_jsonl(material.folder / "rows.jsonl", rows))
    with pytest.raises(ValueError, match=r"row \d|the train data set") as caught:
        train(FastSFTTrainer, material, dataset)
    assert all(part in str(caught.value) for part in parts), caught.value
    with pytest.raises(Exception):  # noqa: B017, PT011 - each its own, mostly none that helps
        train(SFTTrainer, material, dataset)


GOOD: list[tuple[str, Rows]] = [
    ("messages beside an empty text", [{"messages": TURNS, "text": None}, {"messages": TURNS, "text": "a"}]),
    ("tokens beside an empty text", [{"input_ids": [5, 6], "text": None}, {"input_ids": [5, 6], "text": "a"}]),
    ("text and mixed other values", [{"text": "a b", "label": 1}, {"text": "a b", "label": "one"}]),
    ("messages with tools", [{"messages": TURNS}, {"messages": [{**TURNS[0], "tool_calls": [{"a": 1}]}]}]),
]


@pytest.mark.parametrize("rows", [rows for _, rows in GOOD], ids=[name for name, _ in GOOD])
@pytest.mark.parametrize("trainer_class", [SFTTrainer, FastSFTTrainer])
def test_what_stock_trains_on_is_not_refused(material: Material, trainer_class: type[SFTTrainer], rows: Rows) -> None:
    train(trainer_class, material, read(write_jsonl(material.folder / "rows.jsonl", rows * 4)))


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_bytes_not_in_utf8_name_their_row(material: Material, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    texts = ("a b", "a b", "café", "a b")
    rows: Rows = [{"text": text} if kind == "text" else {kind: [{**TURNS[0], "content": text}]} for text in texts]
    data = material.folder / "rows.jsonl"
    data.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("latin-1"))
    line = refused(material, capsys, "--config", material.yaml(dataset_name=str(data)))
    with pytest.raises(ValueError, match="row 2") as caught:
        train(FastSFTTrainer, material, read(data))
    for part in ("row 2 of the train data set", "UnicodeDecodeError", "save the file as UTF-8"):
        assert part in line
        assert part in str(caught.value)
    assert f"data {str(data)!r}" in line


FILES: list[tuple[str, str, bytes, list[str]]] = [
    ("latin-1 csv", "a.csv", "text\nabc\ncafé\n".encode("latin-1"), ["can't decode byte 0xe9"]),
    ("a cut line", "a.jsonl", b'{"text": "a"}\n{"text": "b', ["line 2 is not one JSON object"]),
    ("single quotes", "a.jsonl", b"{'text': 'a'}\n", ["line 1 is not one JSON object", "double quotes"]),
    ("a cut array", "a.json", b'[{"text": "a"},\n {"text": ', ["cannot be loaded", "at position 25"]),
    ("blank lines", "a.jsonl", b"\n\n", ["it holds no rows"]),
    ("a header alone", "a.csv", b"text\n", ["it holds no rows"]),
    *((f"an empty {name}", name, b"", [f"{name} holds no rows"]) for name in ("a.jsonl", "a.parquet", "a.csv")),
    ("cut in gzip", "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n\n{"text": "b\n'), ["line 3 is", ": column 12)"]),
    ("cut in .json", "a.json", b'{"text": "a"}\n{"text"}\n', ["line 2 is", "(Expecting ':' delimiter: column 8)"]),
    ("no gzip", "a.jsonl.gz", b"not gzip", ["Not a gzipped file"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "parts"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_a_file_that_cannot_be_loaded_is_one_line_also_from_its_folder(
    material: Material, capsys: pytest.CaptureFixture[str], name: str, content: bytes, parts: list[str]
) -> None:
    file = material.folder / "data" / name
    file.parent.mkdir()
    file.write_bytes(content)
    for given in (file, file.parent):
        line = refused(material, capsys, "--config", material.yaml(dataset_name=str(given)))
        assert all(part in line for part in [f"data {str(given)!r}", *parts]), line
        assert "line 1 " not in line or "line 1 is not" in line, "a second number"


TURN = {"from": "human", "value": "a"}
COLUMNS: list[tuple[str, dict[str, Any], str]] = [
    ("SFT", {"question": "a", "answer": "b"}, "columns question, answer: sft needs messages"),
    ("SFT", {"instruction": "a", "output": "b"}, "dataset_format: alpaca"),
    ("SFT", {"messages": [TURN]}, "'messages', in the format of ShareGPT: set dataset_format: sharegpt, or rename"),
    ("SFT", {"prompt": [TURN], "completion": [TURN]}, "in the format of ShareGPT: rename them to role and content"),
    ("DPO", {"question": "a", "good": "b"}, "columns question, good: dpo needs chosen and rejected: rename them"),
    ("DPO", {"prompt": [TURN], "chosen": [TURN], "rejected": [TURN]}, "value in 'chosen', in the format of ShareGPT"),
    ("KTO", {"prompt": "a", "completion": "b"}, "kto needs prompt and completion and label"),
    ("Reward", {"text": "a"}, "reward needs chosen and rejected, or chosen_ids and rejected_ids: rename them; or use"),
    ("GRPO", {"question": "a"}, "grpo needs prompt: rename them"),
]


@pytest.mark.parametrize(("method", "row", "says"), COLUMNS)
def test_columns_of_another_form_are_named_alike_in_python_and_from_the_command_line(
    material: Material, capsys: pytest.CaptureFixture[str], method: str, row: dict[str, Any], says: str
) -> None:
    trainer_class, config = METHODS[method.lower()].classes
    rewards, more = {}, {"packing": ..., "max_length": ...}
    if method == "GRPO":
        rewards = {"reward_funcs": [len]}
        more |= {"reward_funcs": ["accuracy_reward"], "num_generations": 2, "gradient_accumulation_steps": 2}
    args = config(output_dir=str(material.out), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(DataError) as caught:
        trainer_class(model=str(material.model), args=args, train_dataset=Dataset.from_list([row] * 4), **rewards)
    assert says in str(caught.value)
    path = material.yaml(dataset_name=str(write_jsonl(material.folder / "rows.jsonl", [row] * 4)), **more)
    assert str(caught.value) in refused(material, capsys, "--config", path, command=method.lower())
