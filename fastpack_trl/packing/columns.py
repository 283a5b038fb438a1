"""Columns of the data that each method reads; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastpack_trl.errors import short_repr

_PAIRS, _PROMPT = ("chosen", "rejected"), ("prompt",)
COLUMNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("conversations",), ("prompt", "completion"), ("input_ids",), ("text",)),
    "dpo": (_PAIRS,), "reward": (_PAIRS, ("chosen_ids", "rejected_ids")),
    "kto": (("prompt", "completion", "label"), _PAIRS), "grpo": (_PROMPT,), "rloo": (_PROMPT,),
}  # fmt: skip
"""Method -> its columns, all of one of these. Errors of a method without an entry name the column that is missing."""
_TURNS = "a list of turns such as {'role': 'user', 'content': '...'}"
_TYPES: Mapping[str, tuple[Any, str]] = {
    "text": (str, "a string"), "messages": (list, _TURNS), "conversations": (list, _TURNS),
    **dict.fromkeys(("prompt", "completion", *_PAIRS), ((str, list), f"a string or {_TURNS}")),
}  # fmt: skip
"""What some columns hold."""


def made_for(columns: Iterable[str]) -> str:
    """Return the most specific method for columns: ``["prompt", "chosen", "rejected"]`` -> ``"dpo"``; else ``""``."""
    fits = [(len(kind), method) for method, kinds in COLUMNS.items() for kind in kinds if {*kind} <= {*columns}]
    return max(fits, key=lambda fit: fit[0], default=(0, ""))[1]


def column_fault(row: Mapping[str, Any], name: str, method: str, args: Any = None, error: Any = None) -> str:
    """Return why `method` cannot train on a data set with this first row, and the fix; empty if it can.

    `args` may have a `dataset_text_field`. `error` of the preparation names the column if `COLUMNS` lacks the method.
    """
    listed = COLUMNS.get(method, ((str(error.args[0]),),) if isinstance(error, KeyError) and error.args else ((),))
    text_field = getattr(args, "dataset_text_field", "text")
    kinds = [tuple(text_field if column == "text" else column for column in kind) for kind in listed]
    data = f"the {name} data set has"
    if fits := [kind for kind in kinds if row.keys() >= {*kind}]:
        for column in fits[0] if len(fits) == 1 else ():
            wanted, said = _TYPES.get("text" if column == text_field else column, (object, ""))
            if not isinstance(row[column], wanted):
                return f"{data} {short_repr(row[column])} in {column!r} of its first row: it must be {said}"
            turns = row[column] if column != "conversations" else None  # which TRL converts
            turn = turns[0] if isinstance(turns, list) and turns else None
            if isinstance(turn, Mapping) and {"from", "value"} <= turn.keys() and "role" not in turn:
                fix = "set dataset_format: sharegpt, or " * (column == "messages") + "rename them to role and content"
                return f"{data} turns of from and value in {column!r}, in the format of ShareGPT: {fix}"
        return ""
    data += f" the columns {', '.join(row)}"
    if {"instruction", "output"} <= row.keys():
        return f"{data}, in the format of Alpaca: dataset_format: alpaca reads them"
    fix = "rename them" + f", or set dataset_text_field (now {text_field!r})" * (method == "sft")
    other = f"; or use `fastpack-trl {made_for(row)}`, which they fit" if made_for(row) else ""
    return f"{data}: {method} needs {', or '.join(map(' and '.join, kinds))}: {fix}{other}"
