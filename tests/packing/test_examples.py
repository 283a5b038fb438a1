"""Data that lose something on their way into training, or cannot be prepared: the report or the error says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from preference_material import build as build_preference
from preference_material import pairs, prompts
from trainer_material import assert_same_log, both, build, make_dataset, make_tokenizer, train

from fastpack_trl import FastSFTTrainer

REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content + ' ' }}{% endfor %}"
)
TURNS = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
SYSTEM = [{"role": "system", "content": "w1"}, TURNS[1]]
NULL = [TURNS[0], {"role": "assistant", "content": None}]
SHORT: dict[str, Any] = {"max_steps": 1, "eval_strategy": "no"}


def completions(*prompt_tokens: int) -> Dataset:
    rows = [{"prompt": "w1 " * tokens, "completion": "w2 w3"} for tokens in prompt_tokens]
    return Dataset.from_list(rows)


def facts(folder: Path, data: Dataset, **options: Any) -> dict[str, Any]:
    trained = train(FastSFTTrainer, folder, fast={}, data=data, trainer={"eval_dataset": None}, **SHORT | options)
    found: dict[str, Any] = trained.fastpack_report.to_dict()["facts"]
    assert all(line in " ".join(str(trained.fastpack_report).split()) for line in found)
    return found


def conversations(bad: list[dict[str, Any]], row: int, count: int = 40) -> Dataset:
    rows = [TURNS] * count
    rows[row] = bad
    return Dataset.from_dict({"messages": rows})


def templated(folder: Path, template: str) -> dict[str, Any]:
    (folder / "template.jinja").write_text(template, encoding="utf-8")
    return {"chat_template_path": str(folder / "template.jinja")}


@pytest.mark.parametrize(
    ("options", "max_length"),
    [
        pytest.param({}, 71, id="padded"),
        pytest.param({"packing": True}, 71, id="packed"),
        pytest.param({"truncation_mode": "keep_end"}, 0, id="cut at the beginning"),
        pytest.param({"packing": True, "packing_strategy": "bfd_split"}, 0, id="continued in the next row"),
    ],
)
def test_documents_cut_before_their_completions_are_counted(
    options: dict[str, Any], max_length: int, tmp_path: Path
) -> None:
    data = completions(3, 60, 70, 4)
    said = facts(tmp_path, data, **options).get("documents without loss tokens", "")
    assert said == (f"2 after truncation: max_length={max_length} keeps at least one in each" if max_length else "")
    if max_length:
        assert "documents without loss tokens" not in facts(tmp_path, data, **options | {"max_length": max_length})
        fewer = facts(tmp_path, data, **options | {"max_length": max_length - 1})["documents without loss tokens"]
        assert fewer.startswith("1 after truncation")


def test_documents_without_a_label_are_counted_apart(tmp_path: Path) -> None:
    ids = [[5, 6, 7], [5, 6, 7], [5], [5] * 60]
    labels = [[-100, 6, 7], [-100] * 3, [5], [-100] * 55 + [5] * 5]
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    said = facts(tmp_path, data, packing=True)["documents without loss tokens"]
    assert said.startswith("1 after truncation: max_length=56 keeps at least one in each; 2 before truncation")


def test_padding_that_is_trained_on_is_counted(tmp_path: Path) -> None:
    ids, mask = [[5, 6, 7, 0, 0]] * 4, [[1, 1, 1, 0, 0]] * 4
    said = facts(tmp_path, Dataset.from_dict({"input_ids": ids, "attention_mask": mask}))
    assert said["padding trained on"].startswith("8 tokens with attention_mask 0")
    labelled = {"input_ids": ids, "attention_mask": mask, "labels": [[5, 6, 7, -100, 0]] * 4}
    assert facts(tmp_path, Dataset.from_dict(labelled))["padding trained on"].startswith("4 tokens")
    whole = {"input_ids": ids, "attention_mask": [[1] * 5] * 4}
    assert "padding trained on" not in facts(tmp_path, Dataset.from_dict(whole))


@pytest.mark.parametrize("labels", [[0, 1], ["good", "bad"], [["good"], ["bad"]], [0.5, 1.0]], ids=str)
@pytest.mark.parametrize("streamed", [False, True], ids=["", "streamed"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_column_of_class_labels_is_named(labels: list[Any], streamed: bool, packing: bool, tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": ["w1 w2 w3"] * 4, "labels": labels * 2})
    given = data.to_iterable_dataset() if streamed else data
    with pytest.raises(ValueError, match=r"column 'labels' of .*remove_columns\('labels'\)"):
        train(FastSFTTrainer, tmp_path, data=given, packing=packing, trainer={"eval_dataset": None}, **SHORT)


@pytest.mark.parametrize(("name", "prompt", "kept"), [("DPO", 60, 61), ("KTO", 60, 61), ("Reward", 60, 63)])
def test_answers_dropped_by_max_length_are_counted(name: str, prompt: int, kept: int, tmp_path: Path) -> None:
    def data(*prompt_tokens: int) -> Dataset:
        rows = [{"prompt": "w1 " * tokens, "chosen": "w1 w2", "rejected": "w3 w4"} for tokens in prompt_tokens]
        return Dataset.from_list(rows)

    with pytest.raises(ValueError, match=rf"train data set is left.*max_length=48; max_length={kept} keeps all"):
        build_preference(name, tmp_path, fast=True, data=data(prompt, prompt), **SHORT)
    some = build_preference(name, tmp_path, fast=True, data=data(prompt, 3, 4, 5), **SHORT)
    said = some.fastpack_report.facts["train examples"]
    assert said.startswith("2 of 8 dropped" if name == "KTO" else "1 of 4 dropped")
    assert said.endswith(f"max_length={kept} keeps all")
    every = build_preference(name, tmp_path, fast=True, data=data(prompt, 3, 4, 5), **SHORT, max_length=kept)
    assert "train examples" not in every.fastpack_report.facts


def test_empty_data_are_named(tmp_path: Path) -> None:
    empty, stream = make_dataset("text").select([]), IterableDataset.from_generator(lambda: iter(()))
    for given, name in ((empty, "eval"), ({"held out": empty}, "held out"), (stream, "eval")):
        with pytest.raises(ValueError, match=f"the {name} data set is empty"):
            build(FastSFTTrainer, tmp_path, trainer={"eval_dataset": given})
    trainer = build(FastSFTTrainer, tmp_path)
    with pytest.raises(ValueError, match="the eval data set is empty"):
        trainer.evaluate(empty)
    for method, data in (("DPO", pairs()), ("Reward", pairs()), ("GRPO", prompts())):
        with pytest.raises(ValueError, match="train_dataset is empty"):
            build_preference(method, tmp_path, fast=True, data=data.select([]), **SHORT)
        if method != "GRPO":
            with pytest.raises(ValueError, match="the eval data set is empty"):
                build_preference(method, tmp_path, fast=True, evaluated=data.select([]))


@pytest.mark.parametrize("row", [0, 1, 26, 39])
@pytest.mark.parametrize("bad", [SYSTEM, NULL], ids=["refused", "null"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_conversation_that_a_template_refuses_is_named(
    bad: list[dict[str, Any]], row: int, packing: bool, tmp_path: Path
) -> None:
    data, remedy = conversations(bad, row), "turn 1 of 'messages' has no content" if bad is NULL else "System role"
    with pytest.raises(ValueError, match=rf"row {row} of the train data set .*{remedy}"):
        build(FastSFTTrainer, tmp_path, data=data, packing=packing, **templated(tmp_path, REFUSES))
    with pytest.raises(ValueError, match=rf"row {row} of the eval data set .*{remedy}"):
        build(FastSFTTrainer, tmp_path, trainer={"eval_dataset": data}, **templated(tmp_path, REFUSES))


def test_a_template_that_refuses_every_conversation_and_a_pair_of_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 0 of the train data set .*System role"):
        data = Dataset.from_dict({"messages": [SYSTEM] * 9})
        build(FastSFTTrainer, tmp_path, data=data, **templated(tmp_path, REFUSES))
    asked = [TURNS[:1]] * 5 + [SYSTEM[:1]] + [TURNS[:1]] * 3
    data = Dataset.from_dict({"prompt": asked, "chosen": [TURNS[1:]] * 9, "rejected": [TURNS[1:]] * 9})
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REFUSES
    with pytest.raises(ValueError, match=r"row 5 of the train data set .*System role"):
        build_preference("DPO", tmp_path, fast=True, data=data, trainer={"processing_class": tokenizer})


def test_an_error_of_a_setting_stays_that_of_stock(tmp_path: Path) -> None:
    def fails(example: dict[str, Any]) -> str:
        raise LookupError("no such column")

    with pytest.raises(LookupError, match="no such column"):
        build(FastSFTTrainer, tmp_path, trainer={"formatting_func": fails})


def test_turns_whose_content_is_null_are_counted_where_the_template_takes_them(tmp_path: Path) -> None:
    takes = templated(tmp_path, "{% for m in messages %}{{ m.content }} {% endfor %}")
    said = facts(tmp_path, conversations(NULL, 26), **takes)["turns without content"]
    assert said.startswith("1 of 40 conversations")
    assert "row 26" in said
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "w5"}}]}]
    told = [[{**turn, "tool_calls": None} for turn in TURNS], [{**TURNS[0], "tool_calls": None}, *calls]]
    assert "turns without content" not in facts(tmp_path, Dataset.from_dict({"messages": told}), **takes)


def test_labels_of_a_streamed_evaluation_set_are_not_called_edited(tmp_path: Path) -> None:
    stream = make_dataset("prompt_completion", 8, seed=7).to_iterable_dataset()
    ours, stock = both(tmp_path, data="prompt_completion", packing=True, trainer={"eval_dataset": stream})
    assert_same_log(ours, stock)
    reason = ours.fastpack_report["sync_free"].reason
    assert "labels were copied (accelerate does so with a streamed evaluation set" in reason
