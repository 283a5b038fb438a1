"""Errors and remarks about examples that TRL prepares: which one cannot be prepared, and what the loss leaves out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, IterableDataset, LargeList, List
from numpy.typing import NDArray

from fastpack_trl.errors import DataError, describe, shown
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

_CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_TEMPLATE = "jinja2"  # whose errors chat templates raise
_CONTENT, _CALLS = ("content", "value"), ("tool_calls", "function_call")
_ROWS_AT_A_TIME = 10_000
_ROWS_OF_A_CHUNK = 100  # on average, below which chunks are joined: each costs a tenth of a millisecond


def naming_the_row(prepare: Callable[..., Any], stock: Callable[..., Any], dataset: Any, *given: Any) -> Any:
    """Return what `prepare` makes of a data set; if it fails on one example, name that.

    Args:
        prepare: takes the arguments of `stock`, TRL's own preparation, by which single rows are tried.
        given: the further arguments: the tokenizer, the config, ..., the name of the data set.

    Raises:
        DataError: the data set is empty, or an example cannot be prepared; names its number.
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
        alone = copy.copy(given[1])
        alone.dataset_num_proc = None
        # The processes of a run prepare in turn: one that tried again by itself would wait for the others.
        one_process = PartialState().num_processes == 1
        row = None
        if one_process and isinstance(dataset, Dataset):
            row = _first_failure(dataset, lambda rows: stock(rows, given[0], alone, *given[2:]))
        why = _why_not_prepared(error, name, row)
        if not why:
            raise
        turn = "" if row is None else next((place for _, place in _null_turns(dataset.select([row]))), "")
        null = f"; {turn} has no content (null): fill it or drop the row" if turn else ""
        raise DataError(why + null + _contents(dataset, row)) from error


def _why_not_prepared(error: Exception, name: str, row: int | None) -> str:
    """Describe an error of a row, or of one that is not known; empty if it may be of something else."""
    where = f"some row of the {name} data set" if row is None else f"row {row} of the {name} data set (the first is 0)"
    if type(error).__module__.startswith(_TEMPLATE):
        return (
            f"the chat template cannot render {where}: {describe(error)}: correct the messages or the template "
            "(chat_template_path names another)"
        )
    if "assistant_only_loss" in str(error):  # TRL blames the template
        return (
            f"assistant_only_loss=True, but {where} has nothing of the assistant: drop such rows, or let the chat "
            "template mark what it writes with {% generation %}"
        )
    hint = "save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else "correct or drop it"
    return "" if row is None else f"{where} cannot be prepared ({type(error).__name__}: {describe(error)}): {hint}"


def _contents(dataset: Any, row: int | None) -> str:
    if row is None:
        return ""
    try:
        return f"; it holds {shown(dataset[row])}"
    except UnicodeDecodeError:
        return ""


def _first_failure(dataset: Dataset, again: Callable[[Dataset], object]) -> int | None:
    """Return the first row on which `again` fails; None if all do, e.g. because of a setting, or none by itself."""

    def failure(start: int, stop: int, first: int = 0) -> Exception | None:
        try:
            # TRL takes the kind of data from the first row.
            again(dataset.select([first, *range(max(first + 1, start), stop)]))
        except Exception as error:  # noqa: BLE001 - a chat template raises what it likes
            return error
        return None

    start, stop, last = 0, len(dataset), len(dataset) - 1
    with _silent_and_uncached():
        while stop - start > 1:
            middle = (start + stop) // 2
            start, stop = (start, middle) if failure(start, middle) else (middle, stop)
        error = failure(start, stop)
        # A template may refuse every conversation, and every example may hold numbers for text; else it is a setting.
        of_contents = isinstance(error, AttributeError | TypeError | KeyError)
        refused = of_contents or type(error).__module__.startswith(_TEMPLATE)
        if error is None or (start == 0 < last and not refused and failure(last, last, first=last)):
            return None
    return start


@contextlib.contextmanager
def _silent_and_uncached() -> Iterator[None]:
    shows, caches = not datasets.are_progress_bars_disabled(), datasets.is_caching_enabled()
    datasets.disable_progress_bars()
    datasets.disable_caching()
    try:
        yield
    finally:
        if shows:
            datasets.enable_progress_bars()
        if caches:
            datasets.enable_caching()


def check_not_empty(train_dataset: Any) -> None:
    """Check that training data have rows; a stream passes.

    Raises:
        DataError: they have none.
    """
    if isinstance(train_dataset, Dataset) and not len(train_dataset):
        raise DataError("train_dataset is empty: it has 0 rows; check the file, the split or the filter")


def check_label_column(dataset: Dataset | IterableDataset, name: str) -> None:
    """Check that a column `labels` holds lists of token labels, as far as the types of the columns are known.

    Raises:
        DataError: it does not; names its type.
    """
    kind = (dataset.features or {}).get("labels")
    if kind is not None and not is_integer_list(kind):
        raise DataError(
            f"the {name} data set has a column 'labels' of {kind}, which TRL reads as one label per token: remove it "
            "(`dataset.remove_columns('labels')`) or rename it; token labels are lists of token ids, "
            f"{IGNORE_INDEX} where no loss is counted"
        )


def is_integer_list(kind: Any) -> bool:
    """Return whether a column of this type holds a list of integers per row; lists that are all empty are such."""
    inner = str(getattr(kind.feature, "dtype", "")) if isinstance(kind, List | LargeList) else ""
    return inner.startswith(("int", "uint", "null"))


def null_turns(dataset: Any) -> str:
    """Describe the conversations that have a turn without content, for the report; empty if there are none."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or "input_ids" in dataset.column_names:
        return ""
    rows = {row for row, _ in _null_turns(dataset)}
    if not rows:
        return ""
    return (
        f"{len(rows):,} of {len(dataset):,} conversations have a turn whose content is null, which the chat template "
        f"leaves out or writes as 'None'; the first is row {min(rows)} (the first is 0): fill it or drop the row"
    )


def _null_turns(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Yield the row of each turn that has neither content nor tool calls, and its place: ``turn 1 of 'messages'``."""
    for column in _CONVERSATIONS:
        kind = dataset.features.get(column)
        fields = kind.feature if isinstance(kind, List | LargeList) and isinstance(kind.feature, dict) else {}
        if not any(field in fields for field in _CONTENT):
            continue
        before = 0
        for chunk in chunks(dataset, column):
            ends = np.cumsum(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy())
            turns = chunk.flatten()
            read = [pc.struct_field(turns, field) for field in (*_CONTENT, *_CALLS) if field in fields]
            null = np.logical_and.reduce([pc.is_null(values).to_numpy(zero_copy_only=False) for values in read])
            for turn in np.flatnonzero(null):
                row = int(np.searchsorted(ends, turn, side="right"))
                yield before + row, f"turn {turn - (ends[row - 1] if row else 0)} of {column!r}"
            before += len(chunk)


def dropped(stock: Callable[..., Any], prepared: Any, dataset: Any, tokenizer: Any, args: Any, name: str) -> str:
    """Describe the examples of pairs or judged completions that TRL dropped because of `max_length`; empty if none.

    Raises:
        DataError: no training example is left; names the `max_length` that keeps all.
    """
    if args.max_length is None or not isinstance(prepared, Dataset):
        return ""
    unpaired = "completion_ids" in prepared.column_names and "chosen" in dataset.column_names  # by KTO: two of each
    total = len(dataset) * (1 + unpaired)
    if len(prepared) >= total:
        return ""
    whole = copy.copy(args)
    whole.max_length = None
    every = stock(dataset, tokenizer, whole, f"whole {name}")
    prompts = "prompt_ids" in every.column_names
    columns = ["prompt_ids"] if prompts else ["chosen_ids", "rejected_ids"]
    longest = max(int(pc.max(pc.list_value_length(chunk)).as_py()) for col in columns for chunk in chunks(every, col))
    why = "a prompt alone fills max_length" if prompts else "an answer with its prompt is longer than max_length"
    lost = f"{total - len(prepared):,} of {total:,} dropped: {why}={args.max_length}; max_length={longest + prompts}"
    if not len(prepared) and name == "train":
        raise DataError(f"nothing of the train data set is left to train on, {lost} keeps all")
    return f"{lost} keeps all"


def null_padding(dataset: Dataset) -> int:
    """Count tokens that the column `attention_mask`, which TRL does not read, excludes and the loss counts."""
    columns = [name for name in ("attention_mask", "labels") if name in dataset.column_names]
    if "attention_mask" not in columns or not all(is_integer_list(dataset.features[name]) for name in columns):
        return 0
    total = 0
    for pair in zip(*(chunks(dataset, name) for name in columns), strict=True):
        masked, *labels = (pc.fill_null(chunk.flatten(), IGNORE_INDEX).to_numpy() for chunk in pair)
        excluded = masked == 0
        if labels and len(labels[0]) == len(excluded):
            excluded &= labels[0] != IGNORE_INDEX
        total += int(excluded.sum())
    return total


class WithoutLoss(NamedTuple):
    """Documents of which no token is left that the loss counts.

    Attributes:
        cut: those that truncation leaves without one.
        max_length: the smallest that keeps one in each of those.
        always: those that have none before truncation.
    """

    cut: int = 0
    max_length: int = 0
    always: int = 0

    @classmethod
    def of(cls, documents: Dataset, max_length: int | None, *, keep_end: bool) -> WithoutLoss:
        """Count them among tokenized documents; `max_length` None cuts nothing, `keep_end` cuts their beginnings."""
        if "labels" not in documents.column_names:
            return cls()
        needed = np.concatenate([_needed(chunk, keep_end) for chunk in chunks(documents, "labels")])
        cut = needed[needed > (max_length or needed.max(initial=0))]
        return cls(len(cut), int(cut.max(initial=0)), int((needed == 0).sum()))

    def __str__(self) -> str:
        parts = []
        if self.cut:
            parts.append(f"{self.cut:,} after truncation: max_length={self.max_length} keeps at least one in each")
        if self.always:
            parts.append(
                f"{self.always:,} before truncation (labels are all {IGNORE_INDEX}, or one token alone): drop them, or "
                "give completions that are not empty"
            )
        return "; ".join(parts)


def _needed(chunk: Any, keep_end: bool) -> NDArray[np.int64]:
    """Return, of each document, the tokens that must stay for the loss to count one; 0 if it counts none."""
    lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy().astype(np.int64)
    ends: NDArray[np.int64] = np.cumsum(lengths)
    counted = pc.fill_null(pc.not_equal(chunk.flatten(), IGNORE_INDEX), False).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(counted)
    rows: NDArray[np.int64] = np.searchsorted(ends, places, side="right")
    inside = places - (ends - lengths)[rows]
    rows, inside = rows[inside > 0], inside[inside > 0]  # the first token of a document has no prediction
    needed: NDArray[np.int64] = np.zeros(len(lengths), dtype=np.int64)
    if keep_end:
        needed[rows] = lengths[rows] - inside + 1  # with the token before it; of equal rows the last one is written
    else:
        needed[rows[::-1]] = inside[::-1] + 1
    return needed


def chunks(dataset: Dataset, column: str) -> Iterator[Any]:
    """Yield a column as Arrow list arrays, a few thousand rows at a time: a data set may be larger than memory."""
    view = dataset.select_columns([column])
    view.set_format("arrow")  # in place: `with_format` copies the data set's description once more
    for table in view.iter(batch_size=_ROWS_AT_A_TIME):
        scattered = table[column].num_chunks * _ROWS_OF_A_CHUNK > len(table)  # a filtered data set has one per row
        yield from (table.combine_chunks() if scattered else table)[column].chunks
