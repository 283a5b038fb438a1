"""TRL's tokenized rows, made in batches: by the tokenizer's own threads, with labels built by NumPy.

TRL renders, tokenizes and labels row by row, in three passes of Python over all tokens. Here one pass of `Dataset.map`
does a batch at a time, so that fingerprints, cache files and `dataset_num_proc` are those of `datasets`. TRL's own
preparation of a few rows is compared first, and prepares all where they differ.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import multiprocess
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset
from multiprocess.reduction import ForkingPickler
from transformers import PreTrainedTokenizerBase
from trl import is_conversational, is_conversational_from_value, maybe_convert_to_chatml

from fastpack_trl._version import __version__
from fastpack_trl.errors import first_reason
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

logger = logging.getLogger(__name__)

LEAST_ROWS = 500
"""Below, the rows to compare cost more than all."""
ROWS_OF_A_PROCESS = 4_000
"""Conversations for which a process of its own pays: to start it takes as long as some hundred of them."""
_LEAST_CORES = 4  # on two, the tokenizer's threads in one process took less time than two processes
_COMPARED_ROWS = 12
_CHARACTERS = 2_000_000  # of one call of the tokenizer, whose encodings take over a hundred bytes a token
_TOLD_BY = ("prompt", "completion", "chosen", "rejected", "messages")  # columns by which TRL tells conversations
_CHAT_OPTIONS = ("tools", "chat_template_kwargs")
_OF_TOKENIZING = frozenset(  # keywords of a template that are not read by it, but by what tokenizes its text
    ("max_length", "padding", "return_tensors", "sanitize_control_tokens", "tokenizer_kwargs", "truncation")
)

Stock = Callable[..., Any]
"""`SFTTrainer._prepare_dataset`, bound."""
_Ids = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRows:
    """Makes a batch of rows what TRL makes of each: `input_ids` and `labels`, and its columns with the end token.

    Attributes:
        tokenizer: a fast one.
        text_field: name of the column of plain text.
        eos: appended to plain text and completions.
        chat_template: in place of the tokenizer's own.
        conversational: whether rows hold messages.
        assistant_only, completion_only: which tokens have labels.
        packed: leave out what packing drops.
        version: of this package: rows in the cache of another are made anew.
    """

    tokenizer: Any
    text_field: str
    eos: str
    chat_template: str | None
    conversational: bool
    assistant_only: bool
    completion_only: bool
    packed: bool
    version: str = __version__

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the new columns of a batch of rows."""
        columns = {name: batch[name] for name in {*_TOLD_BY, *_CHAT_OPTIONS, self.text_field} if name in batch}
        changed = {} if self.conversational else self._add_eos(columns)
        assistant: _Ids | None = None
        completions: Sequence[int] = ()
        if "prompt" in columns:
            whole = [first + rest for first, rest in zip(columns["prompt"], columns["completion"], strict=True)]
            if self.conversational:
                prompts, _ = self._chats(columns["prompt"], columns, add_generation_prompt=True)
                ids, assistant = self._chats(whole, columns, masks=self.assistant_only)
            else:
                both = self._encode([*columns["prompt"], *whole])
                prompts, ids = both[: len(whole)], both[len(whole) :]
            completions = [self._common(*pair) for pair in zip(prompts, ids, strict=True)]
        elif self.conversational:
            ids, assistant = self._chats(columns["messages"], columns, masks=self.assistant_only)
        else:
            ids = self._encode(columns[self.text_field])
        return (changed if not self.packed else {}) | self._labelled(ids, assistant, completions)

    def _add_eos(self, columns: dict[str, list[str]]) -> dict[str, list[str]]:
        """End texts, where a row has none completions, with the end token; return the columns that TRL writes."""
        texts, completions = (list(columns.get(name, ())) for name in (self.text_field, "completion"))
        for row in range(max(len(texts), len(completions))):
            if texts and not texts[row].endswith(self.eos):
                texts[row] += self.eos
            elif completions and not completions[row].endswith(self.eos):
                completions[row] += self.eos
        changed = {"completion": completions} if completions else {}
        changed |= {self.text_field: texts} if texts else {}
        columns.update(changed)
        return changed

    def _encode(self, texts: list[str], **options: Any) -> _Ids:
        ids: _Ids = []
        for start, stop in _pieces(map(len, texts)):
            ids += self.tokenizer(text=texts[start:stop], return_attention_mask=False, **options)["input_ids"]
        return ids

    def _chats(
        self, chats: list[Any], columns: dict[str, Any], masks: bool = False, **options: Any
    ) -> tuple[_Ids, _Ids | None]:
        """Return the tokens of conversations, and which of them the assistant wrote if `masks`."""
        texts: list[str] = [""] * len(chats)
        ids: _Ids = [[]] * len(chats)
        assistant: _Ids = [[]] * len(chats)
        for rows, more in self._alike(len(chats), columns):
            render = {"chat_template": self.chat_template} | more | options
            for start, stop in _pieces(_characters(chats[row]) for row in rows):
                here = rows[start:stop]
                some = [chats[row] for row in here]
                if masks:
                    found = self.tokenizer.apply_chat_template(
                        some, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **render
                    )
                    _put(ids, here, found["input_ids"])
                    _put(assistant, here, found["assistant_masks"])
                else:
                    _put(texts, here, self.tokenizer.apply_chat_template(some, tokenize=False, **render))
        if masks:
            return ids, assistant
        return self._encode(texts, add_special_tokens=False), None

    @staticmethod
    def _alike(rows: int, columns: dict[str, Any]) -> Iterator[tuple[Sequence[int], dict[str, Any]]]:
        """Yield rows whose templates get the same tools and keywords, with these."""
        groups: dict[str, tuple[list[int], dict[str, Any]]] = {}
        given = [columns[name] for name in _CHAT_OPTIONS if name in columns]
        if not given:
            yield range(rows), {"tools": None}
            return
        for row in range(rows):
            tools = columns["tools"][row] if "tools" in columns else None
            tools = json.loads(tools) if isinstance(tools, str) else tools
            more = columns["chat_template_kwargs"][row] if "chat_template_kwargs" in columns else {}
            groups.setdefault(repr((tools, more)), ([], {"tools": tools, **more}))[0].append(row)
        yield from groups.values()

    def _common(self, prompt: list[int], whole: list[int]) -> int:
        """Return where the completion begins: at the end of the prompt, or where its tokens are others."""
        if whole[: len(prompt)] == prompt:
            return len(prompt)
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
        if length < len(prompt):
            _say_that_prompts_differ()
        return length

    def _labelled(self, ids: _Ids, assistant: _Ids | None, completions: Sequence[int]) -> dict[str, Any]:
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        ends = np.cumsum(lengths)
        tokens = _flat(ids, int(lengths.sum()), np.int32)
        out = {"input_ids": tokens}
        counted: Any = np.ones(len(tokens), dtype=np.bool_)
        if assistant is not None:
            counted &= _flat(assistant, len(tokens), np.int64) == 1
            if not all(1 in mask for mask in assistant):
                raise RuntimeError(
                    "assistant_only_loss=True, and the template marks no token of some conversation as the "
                    "assistant's: mark what it writes with {% generation %} in the chat template"
                )
        if len(completions):
            completed = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths) >= np.repeat(completions, lengths)
            if self.completion_only:
                counted &= completed
            elif not self.packed:
                out["completion_mask"] = completed.astype(np.int64)
        out["labels"] = np.where(counted, tokens, IGNORE_INDEX).astype(np.int64)
        return {name: np.split(values, ends[:-1]) for name, values in out.items()}


def tokenized(
    dataset: Dataset, tokenizer: Any, args: Any, packing: bool, formatting: Any, name: str, *, stock: Stock,
    trainer: Any,
) -> tuple[Dataset | None, str]:  # fmt: skip
    """Tokenize and label a data set as `stock` does, without cutting or packing it.

    Args:
        dataset, tokenizer, args, packing, formatting, name: the arguments of `stock`.
        stock: whose rows are compared first.
        trainer: whose template and kind of loss hold.

    Returns:
        The data set, with input_ids and labels alone if it will be packed; None where stock has to do it, and why,
        which is empty where there is little to gain.
    """
    if len(dataset) < LEAST_ROWS or "input_ids" in dataset.column_names:
        return None, ""
    first = dataset[0]
    turns = is_conversational_from_value(first)
    conversational = turns or is_conversational(first)

    def make(rows: Dataset, processes: int | None = None) -> Dataset:
        if turns:
            title = f"Converting {name} dataset to ChatML"
            rows = rows.map(maybe_convert_to_chatml, remove_columns="conversations", desc=title, num_proc=processes)
        fresh = TokenizedRows(
            tokenizer=tokenizer, text_field=args.dataset_text_field, eos=tokenizer.eos_token, packed=packing,
            chat_template=trainer.chat_template, conversational=conversational,
            assistant_only=args.assistant_only_loss, completion_only=bool(trainer.completion_only_loss),
        )  # fmt: skip
        dropped = [column for column in rows.column_names if packing or (column == "messages" and not conversational)]
        title = f"Tokenizing {name} dataset"
        return rows.map(fresh, batched=True, remove_columns=dropped or None, desc=title, num_proc=processes)

    def as_stock(rows: Dataset) -> Dataset:
        done = stock(rows, tokenizer, _alone(args), False, None, name)
        return done.select_columns(["input_ids", "labels"]) if packing else done

    why = first_reason(_reasons(dataset, tokenizer, formatting, stock)) or _difference(dataset, make, as_stock)
    if why:
        return None, why
    state = PartialState()
    with state.main_process_first(), state.local_main_process_first():  # the others find the cache, as in stock
        some = _processes(len(dataset), tokenizer) if conversational else None
        return make(dataset, args.dataset_num_proc or some), ""


def _reasons(dataset: Dataset, tokenizer: Any, formatting: Any, stock: Stock) -> Iterator[object]:
    """Yield why a data set is prepared by stock."""
    fast = isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.is_fast
    yield not fast and f"{type(tokenizer).__name__} has no batches: give a fast tokenizer"
    yield formatting is not None and "formatting_func makes each row by itself: give a column of text"
    yield stock.__module__ != "trl.trainer.sft_trainer" and f"_prepare_dataset is that of {stock.__module__}"
    yield not isinstance(tokenizer.eos_token, str) and "the tokenizer has no eos_token: set one"
    formatted = dataset.format["type"] is not None or set(dataset.format["columns"]) != set(dataset.column_names)
    yield formatted and "the data set is formatted: reset_format() gives it back as it is stored"
    made = sorted({"labels", "completion_mask", "assistant_masks"}.intersection(dataset.column_names))
    yield made and f"the data set has a column {made[0]!r} beside text, which stock would read: rename it"
    keywords = dataset.features.get("chat_template_kwargs", {})
    yield not isinstance(keywords, dict) and "chat_template_kwargs has keys of its own in each row: give all the same"
    odd = sorted(_OF_TOKENIZING.intersection(keywords))
    yield odd and f"chat_template_kwargs has {', '.join(odd)}, which cut or pad each row: leave it to max_length"
    first = dataset[0]
    kinds = {is_conversational({column: first[column]}) for column in _TOLD_BY if column in first}
    yield len(kinds) > 1 and "one column holds messages and another text: let all hold messages"


@functools.cache
def _say_that_prompts_differ() -> None:
    logger.warning(
        "the tokens of a prompt alone are not those with which prompt and completion begin: the completion starts "
        "where they differ. Let the chat template render a prompt alike in both, or end prompts where a token ends"
    )


def _alone(args: Any, max_length: int | None = None, shuffle: bool = False) -> Any:
    """Return a copy of the arguments for one process, which cuts and shuffles as is said."""
    plain = copy.copy(args)
    plain.max_length, plain.shuffle_dataset, plain.dataset_num_proc = max_length, shuffle, None
    return plain


def _difference(
    dataset: Dataset, ours: Callable[[Dataset], Dataset], stock: Callable[[Dataset], Dataset]
) -> str:  # fmt: skip
    """Make a few rows both ways; return how ours are others than stock's, empty where they are equal."""
    places = np.unique(np.linspace(0, len(dataset) - 1, _COMPARED_ROWS, dtype=np.int64))
    features = dataset.features

    def few() -> Dataset:
        return Dataset.from_dict(dataset[places], features=features)  # in memory: nothing of them is cached

    try:
        with _without_progress_bars():
            theirs, mine = stock(few()), ours(few())
    except Exception as error:  # noqa: BLE001 - stock meets it again, and says the row
        return f"{type(error).__name__} in rows that were tried"
    if not len(theirs) and not len(mine):
        return ""
    if mine.features != theirs.features or mine.column_names != theirs.column_names:
        return f"this TRL makes the columns {theirs.features}, not {mine.features}"
    same = mine.with_format("arrow")[:].equals(theirs.with_format("arrow")[:])
    return "" if same else "this TRL makes other rows"


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _processes(conversations: int, tokenizer: Any) -> int | None:
    """Return in how many processes templates are rendered, which threads of Python cannot share; None: in this one."""
    if multiprocess.get_start_method() != "fork":
        return None  # others would import a script without a guard anew
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = min(cores, conversations // ROWS_OF_A_PROCESS)
    return count if cores >= _LEAST_CORES and count > 1 and _can_be_sent(tokenizer) else None


def _can_be_sent(tokenizer: Any) -> bool:
    try:
        ForkingPickler.dumps(tokenizer)
    except Exception:  # noqa: BLE001 - a part written in Python raises what it likes
        return False
    return True


def cut(documents: Dataset, args: Any, name: str, stock: Callable[[Dataset, Any], Dataset]) -> Dataset:
    """Cut labelled documents to `max_length`, drop those of which no label is left, and shuffle, as `args` say.

    Args:
        documents, args, name: as of stock's preparation.
        stock: prepares documents that are not packed, by the arguments that it is given.
    """

    def make(rows: Dataset, processes: int | None = None) -> Dataset:
        options = {"most": args.max_length, "tail": args.truncation_mode == "keep_end"}
        title = f"Truncating {name} dataset"
        done = rows.with_format("arrow").map(_cut, batched=True, fn_kwargs=options, desc=title, num_proc=processes)
        kept = _has_labels(done)
        return (done if kept.all() else done.select(np.flatnonzero(kept))).with_format(None)

    if args.max_length is None or len(documents) < LEAST_ROWS or documents.format["type"] is not None:
        return stock(documents, args)
    few = _alone(args, args.max_length)
    if "labels" not in documents.column_names or _difference(documents, make, lambda rows: stock(rows, few)):
        return stock(documents, args)
    state = PartialState()
    with state.main_process_first(), state.local_main_process_first():
        return stock(make(documents, args.dataset_num_proc), _alone(args, shuffle=args.shuffle_dataset))


def _cut(table: Any, most: int, tail: bool) -> Any:
    for name in ("input_ids", "labels"):
        lists = table[name].combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        kept = np.minimum(lengths, most)
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        first: Any = np.repeat(lengths - kept, lengths) if tail else 0
        inside = (place >= first) & (place < first + np.repeat(kept, lengths))
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
        fresh = pa.ListArray.from_arrays(pa.array(offsets), lists.flatten().filter(pa.array(inside)))
        table = table.set_column(table.column_names.index(name), name, fresh)
    return table


def _has_labels(documents: Dataset) -> Any:
    parts = []
    for table in documents.select_columns(["labels"]).with_format("arrow").iter(batch_size=10_000):
        for chunk in table["labels"].chunks:
            counted = pc.not_equal(chunk.flatten(), IGNORE_INDEX).to_numpy(zero_copy_only=False)
            lengths = pc.list_value_length(chunk).to_numpy(zero_copy_only=False)
            sums = np.concatenate([[0], np.cumsum(counted)])
            ends = np.cumsum(lengths)
            parts.append(sums[ends] > sums[ends - lengths])
    return np.concatenate(parts)


def _pieces(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of neighbours that are together up to `_CHARACTERS`, at least one."""
    start = total = stop = 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= _CHARACTERS:
            yield start, stop
            start, total = stop, 0
    if stop > start:
        yield start, stop


def _characters(chat: Iterable[Any]) -> int:
    return sum(len(str(message)) for message in chat)


def _put(into: list[Any], rows: Sequence[int], values: Iterable[Any]) -> None:
    for row, value in zip(rows, values, strict=True):
        into[row] = value


def _flat(rows: Iterable[Iterable[int]], count: int, dtype: Any) -> Any:
    return np.fromiter(itertools.chain.from_iterable(rows), dtype, count)
