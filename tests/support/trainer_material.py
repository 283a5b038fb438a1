"""A small tokenizer, data of every TRL kind, and two trainers side by side."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from side_by_side import assert_equal
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.testing import tiny_model


def callback(event: str, act: Callable[[Any, Any], object], name: str = "Calls") -> type[TrainerCallback]:
    """A class of callbacks whose method `event` calls ``act(state, model)``."""

    def method(self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        act(state, model)

    return type(name, (TrainerCallback,), {event: method})


class EndsEpoch(TrainerCallback):
    """Ends the first epoch as the second step begins: the step is over after one micro-batch."""

    has_ended = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.has_ended:
            self.has_ended = control.should_epoch_stop = True


def halve(state: Any, model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


Halves = callback("on_substep_end", halve, "Halves")
"""Halves the gradients so far after each micro-batch but the last of a step."""
WORDS = [f"w{index}" for index in range(90)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <eos> ' }}"
    "{% endgeneration %}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
)
# Figures of time are not figures of training; total_flos counts what ran, and rows without padding are fewer tokens.
TIMES = ("runtime", "per_second", "preparation_time", "step_time", "mfu", "total_flos")


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "<eos>", "user", "assistant", *WORDS]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **tokens)


def sentences(count: int, seed: int, longest: int = 30) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(2, longest))) for _ in range(count)]


@cache
def make_dataset(kind: str, count: int = 60, seed: int = 0) -> Dataset:
    first, second = sentences(count, seed, 12), sentences(count, seed + 1)
    pairs = list(zip(first, second, strict=True))
    if kind == "text":
        return Dataset.from_dict({"text": second})
    if kind == "prompt_completion":
        return Dataset.from_dict({"prompt": [f"{a} " for a in first], "completion": second})
    if kind == "conversational":
        turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
        return Dataset.from_dict({"messages": turns})
    if kind.startswith("packed"):
        return packed_rows(count, seed, labels=kind == "packed_labels")
    tokenizer = make_tokenizer()
    return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in second]})


def packed_rows(count: int, seed: int, *, labels: bool) -> Dataset:
    """Rows that a user has packed, of up to 80 tokens; whose documents share a beginning."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        prefix = draw.choices(range(5, 95), k=draw.randrange(6))
        documents = [prefix + draw.choices(range(5, 95), k=draw.randrange(1, 12)) for _ in range(draw.randrange(1, 6))]
        ids = [token for document in documents for token in document]
        row = {"input_ids": ids, "seq_lengths": [len(document) for document in documents]}
        rows.append(row | ({"labels": [draw.choice((token, token, -100)) for token in ids]} if labels else {}))
    return Dataset.from_list(rows)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    base = {
        "output_dir": str(folder), "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3, "max_length": 48, "report_to": "none", "learning_rate": 1e-3, "use_cpu": True,
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    return base | more


_PREPARED: dict[Any, Dataset] = {}
_OF_THE_DATA = {one.name for one in fields(SFTConfig)} - {one.name for one in fields(TrainingArguments)} | {"seed"}


@contextmanager
def _prepared_once() -> Iterator[None]:
    """Let stock prepare the same rows in the same way once in a process: a third of the time of a short run.

    What ours adds to the preparation is done every time, and so is all of it where columns are formatted by a function.
    """
    stock = SFTTrainer._prepare_dataset

    def prepare(self: Any, dataset: Any, tokenizer: Any, args: Any, packing: bool, formatting: Any, name: str) -> Any:
        if formatting is not None or not isinstance(dataset, Dataset):
            return stock(self, dataset, tokenizer, args, packing, formatting, name)
        options = sorted((field, str(getattr(args, field))) for field in _OF_THE_DATA)
        texts = (tokenizer.backend_tokenizer.to_str(), self.chat_template, str(tokenizer.special_tokens_map))
        key = (dataset._fingerprint, name, packing, self.completion_only_loss, *texts, *options)
        if key not in _PREPARED:
            _PREPARED[key] = stock(self, dataset, tokenizer, args, packing, formatting, name)
        return copy.copy(_PREPARED[key])  # its format is set in place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFTTrainer, "_prepare_dataset", prepare)
        yield


def build(
    cls: type[SFTTrainer], folder: Path, *, family: str = "qwen3", model: Any = None, data: Any = "text",
    fast: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A trainer for a short run.

    Args:
        data: a kind of `make_dataset`, or a data set; a finite one is evaluated too.
        fast: fields of `FastSFTConfig`, None for a plain `SFTConfig`, whose fields are `more`.
        trainer: arguments of the trainer.
    """
    args = settings(folder, **more)
    evaluated = make_dataset(data, 8, seed=7) if isinstance(data, str) else data
    given = {
        "train_dataset": make_dataset(data) if isinstance(data, str) else data,
        "eval_dataset": None if isinstance(data, IterableDataset) else evaluated,
    }
    with _prepared_once():
        return cls(
            tiny_model(family) if model is None else model,
            args=SFTConfig(**args) if fast is None else FastSFTConfig(**args | fast),
            processing_class=make_tokenizer(),
            **given | (trainer or {}),
        )


def train(cls: type[SFTTrainer], folder: Path, *, resume: str = "", **options: Any) -> Any:
    """A short run of `build`'s trainer; `resume` names a checkpoint in `folder`."""
    runner = build(cls, folder, **options)
    runner.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    return runner


def figures(trainer: SFTTrainer) -> list[dict[str, float]]:
    """The log, without times."""
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in trainer.state.log_history]


def assert_same_log(ours: SFTTrainer, stock: SFTTrainer, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    mine, theirs = figures(ours), figures(stock)
    assert len(mine) >= 4
    assert_equal(mine, theirs, rtol, atol)


def assert_line(trainer: Any, feature: str, *said: str, **fields: str) -> None:
    """The report's line of a feature has these `fields`, as ``status="off"``, and all that is `said` in its reason."""
    line = trainer.fastpack_report[feature]
    assert {name: getattr(line, name) for name in fields} == fields, line
    assert all(text in line.reason for text in said), line


def both(folder: Path, **options: Any) -> tuple[FastSFTTrainer, SFTTrainer]:
    """Ours and stock, from the same weights on the same data."""
    fast, model = options.pop("fast", None), copy.deepcopy(options.get("model"))
    ours = train(FastSFTTrainer, folder / "ours", fast=fast, **options | {"model": model})
    return ours, train(SFTTrainer, folder / "stock", **options)
