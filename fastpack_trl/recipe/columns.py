"""Check of a data set's first example, from which TRL takes the type of the data set, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastpack_trl.errors import DataError, short_repr

TEXT, TOKENS, LABEL = "text", "a list of token ids", "true or false"
MESSAGES = "a list of messages, each with role and content"
_TURNS = "a list of turns, each with from and value (with role and content, the column is called messages)"
CONVERSATIONS = {MESSAGES, _TURNS}


def check_row(row: Mapping[str, Any], text_field: str, name: str, columns: Iterable[str] = ()) -> dict[str, str]:
    """Check the first example of a data set.

    Messages name `columns` if `row` does not have all of them.

    Returns:
        The columns that TRL reads, and what each has to hold: ``{"prompt": "text", "completion": "text"}``.

    Raises:
        DataError: no column that TRL reads, or a cell in one that holds something else than it should.
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
            f"dataset_text_field (now {short_repr(text_field)}) to the column with the text, or provide messages, "
            "prompt and completion, or input_ids"
        )
    check_cells(row, read, name)
    return read


def check_cells(row: Mapping[str, Any], read: Mapping[str, str], name: str) -> None:
    """Check that the first row of a data set holds what `read` says of its columns; raise `DataError` if not."""
    for column, what in read.items():
        value = row[column]
        if not _holds(value, what):
            raise DataError(
                f"row 0 of the {name} data set holds {short_repr(value)} in {column!r}, not {what}: correct the data, "
                "drop the row, or choose another column with dataset_text_field (rows count from 0)"
            )


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
