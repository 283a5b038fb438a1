"""Data that lose something on their way into training, or cannot be prepared: the report or the error says which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from preference_material import build as build_preference
from preference_material import pairs, prompts
from trainer_material import assert_same_log, both, build, make_dataset, make_tokenizer

import fastpack_trl
from fastpack_trl import FastSFTTrainer
from fastpack_trl.errors import DataError
from fastpack_trl.packing import dataset as facts
from fastpack_trl.trainers.featured import Of

REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content + ' ' }}{% endfor %}"
)
TURNS = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
SYSTEM = [{"role": "system", "content": "w1"}, TURNS[1]]
NULL = [TURNS[0], {"role": "assistant", "content": None}]
SHORT: dict[str, Any] = {"max_steps": 1, "eval_strategy": "no"}


def template(folder: Path, text: str) -> dict[str, Any]:
    (folder / "template.jinja").write_text(text, encoding="utf-8")
    return {"chat_template_path": str(folder / "template.jinja")}


CUT = {"prompt": ["w1 " * tokens for tokens in (3, 60, 70, 4)], "completion": ["w2 w3"] * 4}
LABELS = [[-100, 6, 7], [-100] * 3, [5], [-100] * 55 + [5] * 5]
UNLABELLED = {"input_ids": [[5, 6, 7], [5, 6, 7], [5], [5] * 60], "labels": LABELS}
PADDED = {"input_ids": [[5, 6, 7, 0, 0]] * 4, "attention_mask": [[1, 1, 1, 0, 0]] * 4}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "w5"}}]}
TOLD = [[{**turn, "tool_calls": None} for turn in TURNS], [{**TURNS[0], "tool_calls": None}, CALL]]
TAKES: dict[str, Any] = {"template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
PACKING: dict[str, Any] = {"packing": True}
BOTH: Any = ({}, PACKING)
LOSS, PADDING, CONTENT = "documents without loss tokens", "padding trained on", "turns without content"
AT_71 = "2 after truncation: max_length=71 keeps at least one in each"


@pytest.mark.parametrize(
    ("columns", "options", "fact", "expected"),
    [
        *((CUT, options, LOSS, AT_71) for options in BOTH),
        *((CUT, options | {"max_length": 70}, LOSS, "1 after truncation") for options in BOTH),
        *((CUT, options | {"max_length": 71}, LOSS, None) for options in BOTH),
        (CUT, {"truncation_mode": "keep_end"}, LOSS, None),
        (CUT, {"packing": True, "packing_strategy": "bfd_split"}, LOSS, None),
        (UNLABELLED, PACKING, LOSS, "1 after truncation: max_length=56 .*; 2 before truncation"),
        (PADDED, {}, PADDING, "8 tokens with attention_mask 0"),
        (PADDED | {"labels": [[5, 6, 7, -100, 0]] * 4}, {}, PADDING, "4 tokens with attention_mask 0"),
        (PADDED | {"attention_mask": [[1] * 5] * 4}, {}, PADDING, None),
        ({"messages": [TURNS] * 26 + [NULL] + [TURNS] * 13}, TAKES, CONTENT, "1 of 40 conversations .* is row 26"),
        ({"messages": TOLD}, TAKES, CONTENT, None),
    ],
)
def test_what_is_lost_is_counted_in_the_report(
    columns: Any, options: dict[str, Any], fact: str, expected: str | None, tmp_path: Path
) -> None:
    if "template" in options:
        options = template(tmp_path, options["template"])
    data, trainer = Dataset.from_dict(columns), {"eval_dataset": None}
    report = build(FastSFTTrainer, tmp_path, data=data, trainer=trainer, eval_strategy="no", **options).fastpack_report
    assert all(line in " ".join(str(report).split()) for line in report.facts)
    assert (fact in report.facts) == (expected is not None)
    assert expected is None or re.match(expected, report.facts[fact])


@pytest.mark.parametrize("labels", [[0, 1], [["good"], ["bad"]]], ids=str)
@pytest.mark.parametrize("streamed", [False, True], ids=["", "streamed"])
def test_a_column_of_class_labels_is_named(labels: list[Any], streamed: bool, tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": ["w1 w2 w3"] * 4, "labels": labels * 2})
    for packing in (False, True):
        with pytest.raises(ValueError, match=r"column 'labels' of .*remove_columns\('labels'\)"):
            build(FastSFTTrainer, tmp_path, data=data.to_iterable_dataset() if streamed else data, packing=packing)


@pytest.mark.parametrize(("name", "dropped"), [("DPO", "1 of 4"), ("KTO", "2 of 8"), ("Reward", "1 of 4")])
def test_answers_dropped_by_max_length_are_counted(name: str, dropped: str, tmp_path: Path) -> None:
    def report(*prompt_tokens: int, **limit: int) -> Any:
        rows = [{"prompt": "w1 " * tokens, "chosen": "w1 w2", "rejected": "w3 w4"} for tokens in prompt_tokens]
        trainer = build_preference(name, tmp_path, fast=True, data=Dataset.from_list(rows), **SHORT, **limit)
        return trainer.fastpack_report.facts.get("train examples")

    with pytest.raises(ValueError, match=r"set is left.*max_length=48; raise max"):
        report(60, 60)
    assert report(60, 3, 4, 5).startswith(f"{dropped} dropped: a")
    assert report(60, 3, 4, 5, max_length=63) is None


def test_empty_data_are_named(tmp_path: Path) -> None:
    empty, stream = make_dataset("text").select([]), IterableDataset.from_generator(lambda: iter(()))
    for given, name in ((empty, "eval"), ({"held out": empty}, "held out"), (stream, "eval")):
        with pytest.raises(ValueError, match=f"the {name} data set is empty"):
            build(FastSFTTrainer, tmp_path, trainer={"eval_dataset": given})
    with pytest.raises(ValueError, match="the eval data set is empty"):
        build(FastSFTTrainer, tmp_path).evaluate(empty)
    for method, data in (("DPO", pairs()), ("Reward", pairs()), ("GRPO", prompts())):
        with pytest.raises(ValueError, match="train_dataset is empty"):
            build_preference(method, tmp_path, fast=True, data=data.select([]), **SHORT)
        if method != "GRPO":
            with pytest.raises(ValueError, match="the eval data set is empty"):
                build_preference(method, tmp_path, fast=True, evaluated=data.select([]))


@pytest.mark.parametrize("row", [0, 1, 26, 39])
@pytest.mark.parametrize(
    ("bad", "fix"), [(SYSTEM, "System role"), (NULL, "turn 1 of 'messages' has no content")], ids=["refused", "null"]
)
def test_the_conversation_that_a_template_refuses_is_named(bad: Any, fix: str, row: int, tmp_path: Path) -> None:
    rows, options = [TURNS] * row + [bad] + [TURNS] * (39 - row), template(tmp_path, REFUSES)
    data = Dataset.from_dict({"messages": rows})
    for packing in (False, True):
        with pytest.raises(ValueError, match=rf"row {row} of the train data set .*{fix}"):
            build(FastSFTTrainer, tmp_path, data=data, packing=packing, **options)
    with pytest.raises(ValueError, match=rf"row {row} of the eval data set .*{fix}"):
        build(FastSFTTrainer, tmp_path, trainer={"eval_dataset": data}, **options)


def test_a_template_that_refuses_every_conversation_and_a_pair_of_many(tmp_path: Path) -> None:
    data = Dataset.from_dict({"messages": [SYSTEM] * 9})
    with pytest.raises(ValueError, match=r"row 0 of the train data set .*System role"):
        build(FastSFTTrainer, tmp_path, data=data, **template(tmp_path, REFUSES))
    asked = [TURNS[:1]] * 5 + [SYSTEM[:1]] + [TURNS[:1]] * 3
    data = Dataset.from_dict({"prompt": asked, "chosen": [TURNS[1:]] * 9, "rejected": [TURNS[1:]] * 9})
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REFUSES
    with pytest.raises(ValueError, match=r"row 5 of the train data set .*System role"):
        build_preference("DPO", tmp_path, fast=True, data=data, trainer={"processing_class": tokenizer})


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward"])
def test_a_trainer_whose_columns_are_not_listed_names_the_missing_one_or_the_bad_row(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = getattr(fastpack_trl, f"Fast{name}Trainer")
    of = Of(type("OddTrainer", (fast._fastpack_of.stock,), {}), "pairs", 2)
    monkeypatch.setattr(fastpack_trl, fast.__name__, type("FastOddTrainer", (fast,), {"_fastpack_of": of}))
    for data, says in (
        (Dataset.from_dict({"question": ["a"], "answer": ["b"]}), "columns question, answer: odd needs chosen: rename"),
        (Dataset.from_list([*pairs(3), *({**row, "chosen": None} for row in pairs(1))]), "row 3 of the train data"),
    ):
        with pytest.raises(DataError, match=says):
            build_preference(name, tmp_path, fast=True, data=data, **SHORT)


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_a_format_that_yields_tables_is_named(form: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the train data set yields (Table|DataFrame): call with_format\(None\)"):
        build(FastSFTTrainer, tmp_path, data=make_dataset("ids").with_format(form))


def test_an_error_of_a_setting_stays_that_of_stock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        build(FastSFTTrainer, tmp_path, trainer={"formatting_func": lambda example: 1 // 0})


def test_labels_of_a_streamed_evaluation_set_are_not_called_edited(tmp_path: Path) -> None:
    stream = make_dataset("prompt_completion", 8, seed=7).to_iterable_dataset()
    ours, stock = both(tmp_path, data="prompt_completion", packing=True, trainer={"eval_dataset": stream})
    assert_same_log(ours, stock)
    reason = ours.fastpack_report["sync_free"].reason
    assert "labels were copied (accelerate does so with a streamed evaluation set" in reason


def test_a_filtered_data_set_is_read_as_one_whose_rows_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ROWS_AT_A_TIME", 16)
    rows = make_dataset("tokenized").map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})
    filtered = rows.filter(lambda row: len(row["input_ids"]) % 3)  # its Arrow columns come in one piece per row
    together = Dataset.from_list(filtered.to_list())
    assert len(rows) > len(filtered) > 16
    assert len(list(facts.pieces(filtered, "input_ids"))) == -(-len(filtered) // 16)
    assert facts.counted_tokens(filtered) == sum(len(ids) - 1 for ids in filtered["input_ids"])
    np.testing.assert_array_equal(facts.column_lengths(filtered, "labels"), facts.column_lengths(together, "labels"))
