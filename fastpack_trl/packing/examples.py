"""Errors and remarks about examples that TRL prepares: which one cannot be prepared, and which it omits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, IterableDataset, LargeList, List

from fastpack_trl.errors import DataError, describe, short_repr
from fastpack_trl.packing.columns import column_fault
from fastpack_trl.packing.dataset import is_integer_list, pieces
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

_CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_CONTENT, _CALLS = ("content", "value"), ("tool_calls", "function_call")


def naming_row(prepare: Callable[..., Any], stock: Callable[..., Any], method: str, dataset: Any, *given: Any) -> Any:
    """Prepare a data set; if that fails, name the columns that `method` needs, or the example at fault.

    Args:
        prepare: takes the arguments of `stock`, TRL's own preparation, which is tried on single rows after a failure.
        given: the further arguments: the tokenizer, the config, ..., the name of the data set.

    Raises `DataError` if the data set is empty, or an example cannot be prepared; names its number.
    """
    name = given[-1]
    try:
        return prepare(dataset, *given)
    except (DataError, OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, StopIteration) or (isinstance(dataset, Dataset) and not len(dataset)):
            why = f"the {name} data set is empty (0 rows): check the file, the split or the filter"
            raise DataError(why) from error
        if not isinstance(first := next(iter(dataset)), Mapping):
            raise DataError(f"the {name} data set yields {type(first).__name__}: call with_format(None)") from error
        is_other = isinstance(error, UnicodeDecodeError) or any(map(callable, given[2:]))  # a function of the user
        if not is_other and (fault := column_fault(first, name, method, given[1], error)):
            raise DataError(fault) from error
        alone, row = copy.copy(given[1]), None
        alone.dataset_num_proc = None
        # The processes of a run prepare in turn: one that tried again by itself would wait for the others.
        if PartialState().num_processes == 1 and isinstance(dataset, Dataset):
            row = _first_failure(dataset, lambda rows: stock(rows, given[0], alone, *given[2:]))
        why = _why_not_prepared(error, f"{'some row' if row is None else f'row {row}'} of the {name} data set", row)
        if not why:
            raise
        if row is not None:
            turn = next((place for _, place in _null_turns(dataset.select([row]))), "")
            why += f"; {turn} has no content (null): fill it or drop the row" if turn else ""
            with contextlib.suppress(UnicodeDecodeError):
                why += f"; it holds {short_repr(dataset[row])}"
        raise DataError(why) from error


def _is_of_template(error: Exception | None) -> bool:
    return type(error).__module__.startswith("jinja2")


def _why_not_prepared(error: Exception, where: str, row: int | None) -> str:
    """Describe an error of a row, or of one that is not known; empty if its cause may be something else."""
    where += "" if row is None else " (the first is 0)"
    if _is_of_template(error):
        fix = "correct the messages or the template (chat_template_path names another)"
        return f"the chat template cannot render {where}: {describe(error)}: {fix}"
    if "assistant_only_loss" in str(error):  # TRL blames the template
        fix = "drop such rows, or let the chat template mark what it writes with {% generation %}"
        return f"assistant_only_loss=True, but {where} has nothing of the assistant: {fix}"
    fix = "save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else "correct or drop it"
    return "" if row is None else f"{where} cannot be prepared ({type(error).__name__}: {describe(error)}): {fix}"


def _first_failure(dataset: Dataset, again: Callable[[Dataset], object]) -> int | None:
    """Return the first row on which `again` fails; None if all do, e.g. because of a setting, or none by itself."""

    def failure(rows: Iterable[int], first: int = 0) -> Exception | None:
        try:
            again(dataset.select(sorted({first, *rows})))  # TRL takes the kind of data from the first row
        except Exception as error:  # noqa: BLE001 - a chat template raises what it likes
            return error
        return None

    start, stop, last = 0, len(dataset), len(dataset) - 1
    with contextlib.ExitStack() as stack:
        if not datasets.are_progress_bars_disabled():
            stack.callback(datasets.enable_progress_bars)
        if datasets.is_caching_enabled():
            stack.callback(datasets.enable_caching)
        datasets.disable_progress_bars()
        datasets.disable_caching()
        while stop - start > 1:
            middle = (start + stop) // 2
            start, stop = (start, middle) if failure(range(start, middle)) else (middle, stop)
        error = failure([start])
        # A template may refuse every conversation, and every example may hold numbers for text; else it is a setting.
        refused = isinstance(error, AttributeError | TypeError | KeyError) or _is_of_template(error)
        if error is None or (start == 0 < last and not refused and failure([], first=last)):
            return None
    return start


def check_given(train_dataset: Any, peft_config: Any, method: str) -> None:
    """Raise `ValueError` for training data without rows or prompts, and for LoRA that experts do not support."""
    if isinstance(train_dataset, Dataset) and not len(train_dataset):
        raise DataError("train_dataset is empty: it has 0 rows; check the file, the split or the filter")
    if isinstance(train_dataset, Dataset) and method in ("grpo", "rloo") and "prompt" not in train_dataset.column_names:
        raise DataError(column_fault(train_dataset[0], "train", method))
    for name in ("lora_dropout", "lora_bias", "use_dora"):
        if getattr(peft_config, "target_parameters", None) and (value := getattr(peft_config, name, None)):
            fix = f"set {name}: {type(value)()}"
            raise ValueError(f"{name}={value} does not work with target_parameters (LoRA on experts): {fix}")


def check_label_column(dataset: Dataset | IterableDataset, name: str) -> None:
    """Raise DataError if a column `labels` holds no lists of token labels, if the types of the columns are known."""
    kind = (dataset.features or {}).get("labels")
    if kind is not None and not is_integer_list(kind):
        problem = f"the {name} data set has a column 'labels' of {kind}, which TRL reads as one label per token"
        fix = "remove it (`dataset.remove_columns('labels')`) or rename it"
        lists = f"token labels are lists of token ids, {IGNORE_INDEX} where no loss is counted"
        raise DataError(f"{problem}: {fix}; {lists}")


def null_turns(dataset: Any) -> str:
    """Describe the conversations that have a turn without content, for the report; empty if none has."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or "input_ids" in dataset.column_names:
        return ""
    rows = {row for row, _ in _null_turns(dataset)}
    if not rows:
        return ""
    problem = f"{len(rows):,} of {len(dataset):,} conversations have a turn whose content is null"
    template = "which the chat template leaves out or writes as 'None'"
    return f"{problem}, {template}; the first is row {min(rows)} (the first is 0): fill it or drop the row"


def _null_turns(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Yield the row of each turn that has neither content nor tool calls, and its place: ``turn 1 of 'messages'``."""
    for column in _CONVERSATIONS:
        kind = dataset.features.get(column)
        fields = kind.feature if isinstance(kind, List | LargeList) and isinstance(kind.feature, dict) else {}
        if not fields.keys() & set(_CONTENT):
            continue
        before = 0
        for lengths, turns in (piece[column] for piece in pieces(dataset, column)):
            read = [pc.struct_field(turns, field) for field in (*_CONTENT, *_CALLS) if field in fields]
            null = np.logical_and.reduce([pc.is_null(values).to_numpy(zero_copy_only=False) for values in read])
            rows, inside = np.arange(len(lengths)).repeat(lengths), np.arange(len(turns))
            inside -= (lengths.cumsum() - lengths).repeat(lengths)
            for row, turn in zip(rows[null], inside[null], strict=True):
                yield before + int(row), f"turn {turn} of {column!r}"
            before += len(lengths)


def dropped(prepared: Any, dataset: Any, max_length: int | None, name: str) -> str:
    """Describe the examples of pairs or judged completions that TRL dropped because of `max_length`; empty if none.

    Raises `DataError` if no training example is left.
    """
    if max_length is None or not isinstance(prepared, Dataset):
        return ""
    unpaired = "completion_ids" in prepared.column_names and "chosen" in dataset.column_names  # by KTO: two of each
    total = len(dataset) * (1 + unpaired)
    if len(prepared) >= total:
        return ""
    prompts = "prompt_ids" in prepared.column_names
    why = "a prompt alone fills" if prompts else "an answer with its prompt is longer than"
    lost = f"{total - len(prepared):,} of {total:,} dropped: {why} max_length={max_length}"
    if not len(prepared) and name == "train":
        raise DataError(f"no example of the train data set is left: {lost}; raise max_length")
    return f"{lost}: raise max_length to keep them"
