"""Check of a data set's columns before preparation reads them; names the first row that stock could not read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, LargeList, List, Value

from fastpack_trl.errors import DataError, shown

TEXT, TOKENS, LABEL = "text", "a list of token ids", "true or false"
MESSAGES = "a list of messages, each with role and content"
_TURNS = "a list of turns, each with from and value (with role and content, the column is called messages)"
CONVERSATIONS = {MESSAGES, _TURNS}
_READ = ("input_ids", "messages", "conversations", "prompt", "completion", "labels")
_ROWS_AT_A_TIME = 10_000
_JSON: Any = getattr(datasets, "Json", ())  # datasets>=4.7: the type of a column whose rows have several types

_Fault = tuple[int, str]
_Finder = Callable[[Any], _Fault | None]


def check_source(dataset: Dataset, text_field: str, *, formatted: bool, name: str = "train") -> None:
    """Check the columns that preparation will read, before it reads them. Read from Arrow, not row by row.

    Args:
        dataset: as the user gave it; messages call it `name`.
        text_field: name of the column of plain text.
        formatted: whether a formatting function makes the text.

    Raises:
        DataError: none of the columns that TRL reads, or a cell in one that holds nothing, something else than text,
            messages or token ids, or bytes that are not UTF-8; names what is there and the row.
    """
    columns = dataset.column_names
    texts = {column for column in columns if dataset.features[column] == Value("string")}
    # Preparation writes every row of these anew, also where nobody reads them.
    for column in texts if "input_ids" not in columns else ():
        _check(dataset, column, [_not_utf8], TEXT, name)
    if formatted:
        return
    candidates = [column for column in dict.fromkeys((*_READ, text_field)) if column in columns]
    first = dataset.select_columns(candidates).with_format(None)[0] if candidates else {}
    check_columns(dataset, check_row(first, text_field, name, columns), name)


def check_columns(dataset: Dataset, read: Mapping[str, str], name: str) -> None:
    """Check every row of the columns that are read, each for what it has to hold: ``{"prompt": TEXT}``.

    Raises:
        DataError: as `check_source`.
    """
    for column, what in read.items():
        finders: list[_Finder] = [_null]
        if isinstance(dataset.features[column], _JSON):
            finders += {TEXT: [_no_json_text], MESSAGES: [_no_json_list], _TURNS: [_no_json_list]}.get(what, [])
        elif what in (MESSAGES, _TURNS):
            finders += [_not_utf8, _empty] if isinstance(dataset.features[column], List | LargeList) else [_not_utf8]
        _check(dataset, column, finders, what, name)


def check_row(row: Mapping[str, Any], text_field: str, name: str, columns: Iterable[str] = ()) -> dict[str, str]:
    """Check the first row of a data set, from which TRL takes its type. For a stream that is all that can be seen.

    Messages name `columns` where `row` does not have all of them.

    Returns:
        The columns that TRL reads, and what each has to hold: ``{"prompt": "text", "completion": "text"}``.

    Raises:
        DataError: as `check_source`.
    """
    others = [column for column in ("messages", "conversations", text_field) if row.get(column) is not None]
    if "prompt" in row and others and not {"completion", "input_ids"} & set(row):
        # TRL takes `prompt` for half of a pair, whatever stands beside it (trl 1.16: KeyError 'completion').
        raise DataError(
            f"the {name} data set has a column 'prompt' and no 'completion': provide both, or leave it out, e.g. "
            f"`datasets: [{{path: ..., columns: [{others[0]}]}}]`"
        )
    read = _columns_read(row, text_field)
    if not read:
        raise DataError(
            f"the {name} data set has the columns {', '.join(columns or row)}, of which none can be trained on: set "
            f"dataset_text_field (now {shown(text_field)}) to the column with the text, or provide messages, prompt "
            "and completion, or input_ids"
        )
    check_cells(row, read, name)
    return read


def check_cells(row: Mapping[str, Any], read: Mapping[str, str], name: str) -> None:
    """Check that the first row of a data set holds what `read` says of its columns; raise `DataError` if not."""
    for column, what in read.items():
        value = row[column]
        if not _holds(value, what):
            fault = _NULL if value is None else _EMPTY if value == [] else ""
            raise _error(0, value, fault, column, what, name)


def _columns_read(row: Mapping[str, Any], text_field: str) -> dict[str, str]:
    if "input_ids" in row:
        return {name: TOKENS for name in ("input_ids", "labels") if name in row}
    if is_list_of(row.get("conversations"), "from"):
        return {"conversations": _TURNS}
    pair = ("prompt", "completion") if {"prompt", "completion"} <= set(row) else ()
    if any(is_list_of(row.get(name), "role") for name in pair or ("messages",)):
        return dict.fromkeys(pair or ("messages",), MESSAGES)
    if pair or text_field in row:
        return {name: TEXT for name in (*pair, text_field) if name in row}
    return {name: what for name, what in (("messages", MESSAGES), ("conversations", _TURNS)) if name in row}


def is_list_of(value: object, key: str) -> bool:
    """Return whether `value` is a list of mappings with `key`, by its first item."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and key in value[0]


def _holds(value: Any, what: str) -> bool:
    if what == TEXT:
        return isinstance(value, str)
    if what == LABEL:
        return isinstance(value, bool) or value in (0, 1)
    if what == TOKENS:
        return isinstance(value, list) and not any(isinstance(token, float | str) for token in value[:1])
    return is_list_of(value, "role" if what == MESSAGES else "from")


def _check(dataset: Dataset, column: str, finders: list[_Finder], what: str, name: str) -> None:
    # First all rows as they lie in the file: to pick those of a shuffled data set takes a hundred times longer.
    if not any(find(chunk) for chunk in dataset.data.column(column).chunks for find in finders):
        return
    row = 0
    one = dataset.select_columns([column])
    for table in one.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME):
        for chunk in table[column].chunks:
            for index, fault in filter(None, (find(chunk) for find in finders)):
                value = None if fault else one.with_format(None)[row + index][column]
                raise _error(row + index, value, fault, column, what, name)
            row += len(chunk)


_NULL = "has no {!r} (null): fill it or drop the row"
_EMPTY = "has an empty list in {!r}: drop the row"
_NOT_UTF8 = "has bytes in {!r} that are not UTF-8: save the file as UTF-8, e.g. with `iconv -f LATIN1 -t UTF-8`"


def _error(row: int, value: object, fault: str, column: str, wanted: str, name: str) -> DataError:
    said = fault.format(column) or f"holds {shown(value)} in {column!r}, not {wanted}: correct the data"
    if not fault and wanted == TEXT and column not in _READ:
        said += ", or choose another column with dataset_text_field"
    return DataError(f"row {row} of the {name} data set {said} (rows count from 0)")


def _first(where: Any, fault: str) -> _Fault | None:
    found = np.flatnonzero(where.to_numpy(zero_copy_only=False))
    return (int(found[0]), fault) if found.size else None


def _null(chunk: Any) -> _Fault | None:
    return _first(chunk.is_null(), _NULL) if chunk.null_count else None


def _empty(chunk: Any) -> _Fault | None:
    return _first(pc.equal(pc.list_value_length(chunk), 0), _EMPTY)


def _no_json_text(chunk: Any) -> _Fault | None:
    # Cells are JSON here. `datasets` reads the text "5" among texts and numbers as the number, and stock fails on it.
    return _first(pc.invert(pc.starts_with(chunk.cast(pa.string()), '"')), "")


def _no_json_list(chunk: Any) -> _Fault | None:
    return _first(pc.invert(pc.starts_with(chunk.cast(pa.string()), "[{")), "")


def _not_utf8(chunk: Any) -> _Fault | None:
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid:
        for index, cell in enumerate(chunk):
            try:
                cell.as_py()
            except UnicodeDecodeError:
                return index, _NOT_UTF8
    return None
