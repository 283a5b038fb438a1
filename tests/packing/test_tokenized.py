"""Rows tokenized in batches are TRL's, to the bit, or TRL's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from datasets.fingerprint import Hasher
from preparation_material import assert_equal, make_trainer, prepared
from tokenizers.pre_tokenizers import PreTokenizer
from trainer_material import WORDS, make_tokenizer, sentences
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.errors import DataError
from fastpack_trl.packing import tokenized
from fastpack_trl.packing.tokenized import TokenizedRows
from fastpack_trl.testing import tiny_model

COUNT = tokenized.LEAST_ROWS + 37
FIRST, SECOND = sentences(COUNT, 0, 12), sentences(COUNT, 1)


def turns(*pairs: tuple[str, str], role: str = "role", content: str = "content") -> list[dict[str, str]]:
    return [{role: who, content: text} for who, text in pairs]


def data(kind: str) -> Dataset:
    both = list(zip(FIRST, SECOND, strict=True))
    user = [turns(("user", a)) for a in FIRST]
    answers = [turns(("assistant", b)) for b in SECOND]
    chats = [turns(("user", a), ("assistant", b), *([("user", b)] if len(a) % 2 else [])) for a, b in both]
    more = {"number": list(range(COUNT))}
    if kind == "text":
        return Dataset.from_dict({"text": [f"{b} <eos>" if len(b) % 3 else b for b in SECOND], **more})
    if kind == "text and messages":
        return Dataset.from_dict({"text": SECOND, "messages": SECOND})
    if kind == "pairs":
        return Dataset.from_dict({"prompt": [f"{a} " for a in FIRST], **more, "completion": SECOND})
    if kind == "pairs that merge":
        return Dataset.from_dict({"prompt": FIRST, "completion": SECOND})
    if kind == "conversations":
        return Dataset.from_dict({"messages": chats, **more})
    if kind == "turns":
        renamed = [turns(("user", a), ("assistant", b), role="from", content="value") for a, b in both]
        return Dataset.from_dict({"conversations": renamed, **more})
    if kind == "pairs of messages":
        return Dataset.from_dict({"prompt": user, "completion": answers})
    assert kind == "tools"
    one, other = ([{"type": "function", "function": {"name": name}}] for name in ("find", "count"))
    calls = [json.dumps(one if len(a) % 2 else other) for a in FIRST]
    return Dataset.from_dict({"messages": chats, "tools": calls, "chat_template_kwargs": [{"loud": "w1"}] * COUNT})


KINDS = (
    "text",
    "text and messages",
    "pairs",
    "pairs that merge",
    "conversations",
    "turns",
    "pairs of messages",
    "tools",
)
TOOLS = "{{ (tools[0].function.name if tools else 'w5') + ' ' + (loud or 'w6') + ' ' }}"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp("out"))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that were tokenized here."""
    sizes: list[int] = []
    original = TokenizedRows.__call__

    def call(self: TokenizedRows, batch: Any) -> dict[str, Any]:
        out = original(self, batch)
        sizes.append(len(out["input_ids"]))
        return out

    monkeypatch.setattr(TokenizedRows, "__call__", call)
    return sizes


@pytest.mark.parametrize("how", [
    {"packing": True}, {"packing": True, "packing_strategy": "bfd_split", "shuffle_dataset": True}, {"max_length": 20},
    {"max_length": 20, "truncation_mode": "keep_end", "shuffle_dataset": True}, {"max_length": None},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_stock(trainer: Any, batches: list[int], kind: str, how: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    if kind == "tools":
        tokenizer.chat_template = TOOLS + tokenizer.chat_template
    ours = prepared(trainer, data(kind), tokenizer=tokenizer, **how)
    assert COUNT in batches
    assert_equal(ours, prepared(trainer, data(kind), tokenizer=tokenizer, stock=True, **how))


@pytest.mark.parametrize("kind", ["conversations", "turns", "pairs of messages", "tools"])
@pytest.mark.parametrize("only", [True, False])
def test_assistant_masks(trainer: Any, batches: list[int], kind: str, only: bool) -> None:
    how = {"assistant_only_loss": True, "completion_only_loss": only, "packing": only, "max_length": 30}
    ours = prepared(trainer, data(kind), **how)
    assert COUNT in batches
    assert any(-100 in labels and max(labels) > 0 for labels in ours["labels"])
    assert_equal(ours, prepared(trainer, data(kind), stock=True, **how))


@pytest.mark.parametrize("kind", ["pairs", "pairs of messages"])
def test_a_mask_that_no_label_uses_stays_a_column(trainer: Any, kind: str) -> None:
    ours = prepared(trainer, data(kind), completion_only_loss=False)
    assert "completion_mask" in ours.column_names
    assert_equal(ours, prepared(trainer, data(kind), completion_only_loss=False, stock=True))


def test_a_shuffled_data_set_in_processes_and_small_pieces(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "_CHARACTERS", 500)
    rows = data("conversations").shuffle(seed=3).select(range(510))
    for processes in (None, 2):
        ours = prepared(trainer, rows, dataset_num_proc=processes, packing=True)
        assert_equal(ours, prepared(trainer, rows, stock=True, dataset_num_proc=processes, packing=True))


def test_rows_that_hold_tokens_are_cut_alike(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [[5 + len(word) for word in text.split()] for text in SECOND]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels, "note": SECOND})
    cut = []
    monkeypatch.setattr(
        tokenized, "_cut", lambda table, _as=tokenized._cut, **how: cut.append(how) or _as(table, **how)
    )
    for mode in ("keep_start", "keep_end"):
        how = {"max_length": 9, "truncation_mode": mode}
        ours = prepared(trainer, rows, **how)
        assert len(ours) < COUNT or mode == "keep_end"
        assert_equal(ours, prepared(trainer, rows, stock=True, **how))
    assert len(cut) >= 4


def test_what_is_cached_is_not_made_again(
    trainer: Any, batches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hash(before: str, transform: Any, given: dict[str, Any]) -> str:
        return str(Hasher.hash([before, str(transform), *sorted((name, Hasher.hash(given[name])) for name in given)]))

    monkeypatch.setattr("datasets.arrow_dataset.update_fingerprint", by_hash)  # by chance in other tests
    data("conversations").to_json(tmp_path / "rows.jsonl")

    def read() -> Dataset:
        found = datasets.load_dataset(
            "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert isinstance(found, Dataset)
        return found

    first = prepared(trainer, read())
    assert COUNT in batches
    batches.clear()
    assert_equal(prepared(trainer, read()), first)
    assert COUNT not in batches
    other = make_tokenizer()
    other.chat_template = "{{ 'w3 ' }}" + other.chat_template
    assert prepared(trainer, read(), tokenizer=other)["input_ids"][0] != first["input_ids"][0]
    assert COUNT in batches
    batches.clear()
    datasets.disable_caching()
    try:
        prepared(trainer, read())
    finally:
        datasets.enable_caching()
    assert COUNT in batches


class _OtherInBatches(type(make_tokenizer())):  # type: ignore[misc]
    """Answers a batch with other tokens than its texts one by one."""

    def __call__(self, text: Any = None, **options: Any) -> Any:
        found = super().__call__(text=text, **options)
        if isinstance(text, list):
            found["input_ids"] = [ids[::-1] for ids in found["input_ids"]]
        return found


def test_what_stock_has_to_do_is_named(trainer: Any, batches: list[int]) -> None:
    """By rows that differ, or by what is seen before."""
    odd = _OtherInBatches(tokenizer_object=make_tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    without_end = make_tokenizer()
    without_end.eos_token = None
    rows = data("text")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (rows, {"tokenizer": odd}, "other rows"),
        (rows, {"formatting": lambda row: row["text"] + " w7"}, "formatting_func"),
        (rows.with_format("numpy"), {}, "reset_format"),
        (data("conversations"), {"tokenizer": without_end}, "eos_token"),
    ]
    for given, how, why in cases:
        batches.clear()
        ours = prepared(trainer, given, **how)
        assert why in trainer.seen.row_by_row
        assert why in trainer.seen.lines(48)["tokenized row by row"]
        assert COUNT not in batches
        assert_equal(ours.with_format(None), prepared(trainer, given, stock=True, **how).with_format(None))


def test_a_subclass_between_prepares_by_itself(trainer: Any, batches: list[int]) -> None:
    seen = []

    class Between(SFTTrainer):
        def _prepare_dataset(self, *args: Any) -> Any:
            seen.append(args)
            return super()._prepare_dataset(*args)

    class Mine(FastSFTTrainer, Between):
        pass

    rows = data("text")
    mine = Mine(tiny_model("qwen3"), args=trainer.args, processing_class=make_tokenizer(), train_dataset=rows)
    assert seen
    assert not batches
    assert "_prepare_dataset" in mine.fastpack_run.facts.row_by_row


def test_few_rows_are_stocks_without_a_word(trainer: Any, batches: list[int]) -> None:
    prepared(trainer, data("text").select(range(20)))
    assert not batches
    assert trainer.seen.row_by_row == ""


def test_a_template_without_marks_is_an_error(trainer: Any) -> None:
    silent = make_tokenizer()
    silent.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    for stock in (False, True):
        with pytest.raises(RuntimeError if stock else DataError, match="generation %}"):
            prepared(trainer, data("conversations"), tokenizer=silent, assistant_only_loss=True, stock=stock)


def test_one_row_without_marks_is_an_error_late(trainer: Any) -> None:
    rows = data("conversations").to_list()
    rows[7] = {"messages": turns(("user", WORDS[3])), "number": 7}
    for stock in (False, True):
        # Ours names the row.
        with pytest.raises(RuntimeError if stock else DataError, match="generation %}" if stock else "row 7 of"):
            prepared(trainer, Dataset.from_list(rows), assistant_only_loss=True, stock=stock)


def test_processes_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    assert tokenized._processes(tokenized.ROWS_OF_A_PROCESS, None) is None
    assert tokenized._processes(3 * tokenized.ROWS_OF_A_PROCESS, None) == 3
    assert tokenized._processes(10**6, None) == 16
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2), raising=False)
    assert tokenized._processes(10**6, None) is None
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr("multiprocess.get_start_method", lambda: "spawn")
    assert tokenized._processes(10**6, None) is None


def test_keywords_that_cut_or_pad_tokens_are_left_to_stock(trainer: Any, batches: list[int]) -> None:
    """In one late row alone: those that are compared first do not show it."""
    chats = data("conversations").to_list()
    chats[7]["messages"][0]["content"] = " ".join(WORDS[:1] * 90)
    for keywords, masks in (({"truncation": True, "max_length": 60}, False), ({"padding": True}, True)):
        rows = Dataset.from_list([row | {"chat_template_kwargs": keywords} for row in chats])
        how = {"assistant_only_loss": masks, "max_length": None}
        ours = prepared(trainer, rows, **how)
        assert COUNT not in batches
        assert all(word in trainer.seen.row_by_row for word in keywords)
        assert_equal(ours, prepared(trainer, rows, stock=True, **how))


class _Spaces:
    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda _, part: part.split(" ", "removed"))


def test_a_tokenizer_that_no_process_can_get_stays_in_this_one(
    trainer: Any, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(_Spaces())
    monkeypatch.setattr(tokenized, "ROWS_OF_A_PROCESS", COUNT // 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    assert tokenized._processes(COUNT, make_tokenizer()) == 2
    ours = prepared(trainer, data("conversations"), tokenizer=tokenizer)
    assert COUNT in batches
    assert_equal(ours, prepared(trainer, data("conversations"), tokenizer=tokenizer, stock=True))


def test_pieces_end_at_the_characters() -> None:
    assert list(tokenized._pieces([])) == []
    many = tokenized._CHARACTERS
    assert list(tokenized._pieces([1, many, 5, many - 5, 2])) == [(0, 2), (2, 4), (4, 5)]
