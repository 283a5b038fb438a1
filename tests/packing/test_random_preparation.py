"""Random data sets and settings: the rows that are tokenized in batches are those that stock makes one by one.

What batches could get wrong lies in a few rows that nobody compares: each draw has some of every odd kind.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from preparation_material import assert_equal, make_trainer, prepared
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fastpack_trl.packing import tokenized

COUNT = 120
WORDS = (
    "a",
    "be",
    "the cat",
    "naïve",
    "日本語",
    "🙂🙃",
    "\n\n",
    "  ",
    "x" * 40,
    "<eos>",
    "<pad>",
    "</s>",
    "1,000",
    "\t{{ y }}",
)
TEMPLATE = (
    "{{ bos_token or '' }}{% if tools %}{{ tools | tojson }}{% endif %}{{ mood or '' }}{% for m in messages %}"
    "<|{{ m.role }}|>{% if m.name is defined %}{{ m.name }}:{% endif %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}<eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ 'think' if mood else '' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {"n": 1}}}


@cache
def _core(seed: int) -> str:
    """A byte-level BPE whose tokens go over the words' ends, so that prompts and completions merge."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=seed % 2 == 0)
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=12)) for _ in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<pad>", "<s>", "<eos>", "<|user|>", "<|assistant|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(texts, trainer)
    if seed % 3:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if seed % 4 == 3:  # as some tokenizer.json files have it
        core.enable_truncation(7)
        core.enable_padding(length=9)
    return str(core.to_str())


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core(seed)), pad_token="<pad>", eos_token="<eos>", bos_token="<s>"
    )
    made.chat_template = TEMPLATE
    return made


class Draw:
    """One data set with its settings."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.kind = ("text", "pairs", "chats", "pairs of chats", "turns", "chats")[seed % 6]
        self.tokenizer = tokenizer_of(draw.randrange(12))
        self.field = draw.choice(("text", "body"))
        chats = self.kind not in ("text", "pairs")
        packing = draw.random() < 0.5
        self.how: dict[str, Any] = {
            "packing": packing, "max_length": draw.choice((24, 60, 200)), "dataset_text_field": self.field,
            "packing_strategy": draw.choice(("bfd", "bfd_split", "wrapped")), "shuffle_dataset": draw.random() < 0.3,
            "truncation_mode": draw.choice(("keep_start", "keep_end")),
            "assistant_only_loss": chats and draw.random() < 0.5,
            "completion_only_loss": "pairs" in self.kind and draw.random() < 0.6,
        }  # fmt: skip
        if not packing and draw.random() < 0.3:
            self.how["max_length"] = None
        if self.kind == "pairs" and draw.random() < 0.5:
            self.how["dataset_text_field"] = self.field = draw.choice(("prompt", "completion"))
        self.processes = 2 if seed % 8 == 7 else None
        self.masked = seed in (0, 12)  # columns that stock makes and reads: rows that batches leave to it
        self.rows = self._rows()

    def text(self, *, empty: bool = True) -> str:
        draw = self.draw
        count = draw.choices((0, 1, 5, 30, 150), (0.05 * empty, 0.2, 0.5, 0.2, 0.05))[0]
        said = "".join(word + draw.choice((" ", "", " ")) for word in draw.choices(WORDS, k=count))
        return said + "<eos>" if draw.random() < 0.1 else said

    def turn(self, who: str) -> dict[str, Any]:
        named = {"name": self.draw.choice((None, None, "Zoë"))} if self.named else {}
        return {"role": who, "content": self.text(empty=who == "user"), **named}

    def chat(self) -> list[dict[str, Any]]:
        start = [self.turn("system")] if self.draw.random() < 0.3 else []
        pairs = (((self.turn("user")), self.turn("assistant")) for _ in range(self.draw.randint(1, 4)))
        return start + [turn for pair in pairs for turn in pair]

    def _rows(self) -> Dataset:
        draw, many = self.draw, range(COUNT)
        self.named = draw.random() < 0.4
        columns: dict[str, list[Any]] = {}
        if self.kind == "text":
            columns[self.field] = [self.text() for _ in many]
        elif self.kind == "pairs":
            columns = {name: [self.text() for _ in many] for name in ("prompt", "completion")}
        elif self.kind == "chats":
            columns["messages"] = [self.chat() for _ in many]
        elif self.kind == "turns":
            chats = [self.chat() for _ in many]
            columns["conversations"] = [[{"from": t["role"], "value": t["content"]} for t in chat] for chat in chats]
        else:
            chats = [self.chat() for _ in many]
            columns = {"prompt": [chat[:-1] for chat in chats], "completion": [chat[-1:] for chat in chats]}
        if self.kind not in ("text", "pairs"):
            if draw.random() < 0.4:
                some = ([TOOL], [TOOL, TOOL], None) if draw.random() < 0.5 else (json.dumps([TOOL]), "[]", "null", None)
                columns["tools"] = [draw.choice(some) for _ in many]
            if draw.random() < 0.4:
                columns["chat_template_kwargs"] = [{"mood": draw.choice((None, "glad", ""))} for _ in many]
        types = {}
        if draw.random() < 0.5:
            columns["number"] = [draw.choice((None, index)) for index in many]
            columns["nested"] = [[[index], []] for index in many]
            columns["kind"] = [index % 2 for index in many]
            types["kind"] = ClassLabel(names=["one", "other"])
        made = Dataset.from_dict(columns)
        made = made.cast(Features(dict(made.features) | types)) if types else made
        if self.masked:
            masks = [[draw.choice((0, 1, 1)) for _ in range(300)] for _ in many]
            made = made.add_column(draw.choice(("completion_mask", "assistant_masks")), masks)
        if draw.random() < 0.3 and self.kind == "text":
            made = made.cast_column(self.field, Value("large_string"))
        if draw.random() < 0.3:
            made = made.shuffle(seed=3).select(range(COUNT - 9))
        return made


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("seed", range(24))
def test_rows_are_those_of_stock(trainer: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "LEAST_ROWS", 100)
    monkeypatch.setattr(tokenized, "_CHARACTERS", 3000)
    monkeypatch.setattr(trainer, "chat_template", None)
    drawn = Draw(seed)
    how = drawn.how | {"tokenizer": drawn.tokenizer, "dataset_num_proc": drawn.processes}
    stock = prepared(trainer, drawn.rows, stock=True, **how)
    ours = prepared(trainer, drawn.rows, **how)
    assert bool(trainer.seen.row_by_row) == drawn.masked, (trainer.seen.row_by_row, drawn.kind, drawn.how)
    assert_equal(ours, stock)
