"""Convert data in the columns of Alpaca and ShareGPT to those that TRL reads: the option ``dataset_format``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastpack_trl.errors import DataError, short_repr

AS_IS, ALPACA, SHAREGPT = FORMATS = "as_is", "alpaca", "sharegpt"
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip

_KEPT = {"images", "image", "tools", "chat_template_kwargs"}
"""Columns that TRL reads beside the messages."""

Row = Mapping[str, Any]


@dataclass
class DataArguments:
    """Options of the data that TRL does not have."""

    dataset_format: str = field(
        default=AS_IS,
        metadata={
            "choices": list(FORMATS),
            "help": "Columns of the data: as_is (those that TRL reads), alpaca (instruction, input, output) or "
            "sharegpt (conversations of from and value), which become messages for the chat template.",
        },
    )


def reshape(split: Any, name: str, wanted: str) -> Any:
    """Return a split in columns that TRL reads; as it is for ``as_is``.

    - ``alpaca``: ``prompt`` and ``completion``, both messages; ``system`` and ``history`` are part of the prompt.
    - ``sharegpt``: ``messages``; with ``chosen`` and ``rejected``, also ``prompt``.

    Images, tools and options of the template stay. Raises `DataError` for other columns, a turn of an unknown role, or
    ``<image>`` in the text of a row with images, which TRL would train as text.
    """
    if wanted == AS_IS:
        return split
    columns = list(next(iter(split)))
    turns = "messages" if "messages" in columns else "conversations"
    needed, to = (("instruction", "output"), _alpaca) if wanted == ALPACA else ((turns,), _sharegpt)
    if lacking := [name for name in needed if name not in columns]:
        data, needs = f"the {name} data set has the columns {', '.join(columns)}", " and ".join(lacking)
        raise DataError(f"dataset_format={wanted} needs {needs}, but {data}: leave dataset_format out, or rename them")
    return split.map(lambda row: _without_marks(row, to(row)), remove_columns=[*({*columns} - _KEPT)])


def _without_marks(row: Row, made: dict[str, Any]) -> dict[str, Any]:
    if (row.get("images") or row.get("image")) and "<image>" in str(made):
        data = short_repr(made)
        raise DataError(f"{data} holds '<image>' as text: remove it, because TRL puts images before the first turn")
    return made


def _alpaca(row: Row) -> dict[str, Any]:
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    request = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part not in (None, ""))
    for user, assistant in row.get("history") or ():
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"prompt": [*turns, {"role": "user", "content": request}], "completion": [_answer(row["output"])]}


def _answer(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text if text is None else str(text)}


def _sharegpt(row: Row) -> dict[str, Any]:
    system = [{"from": "system", "value": row["system"]}] if row.get("system") else []
    turns = [_message(turn) for turn in [*system, *_turns(row.get("conversations", row.get("messages")))]]
    if "chosen" in row and "rejected" in row:
        answers = {side: [_message(turn) for turn in _turns(row[side])] for side in ("chosen", "rejected")}
        return {"prompt": turns, **answers}
    return {"messages": turns}


def _turns(given: Any) -> list[Row]:
    turns = [given] if isinstance(given, Mapping) else given
    if not isinstance(turns, list) or not turns:
        raise DataError(f"a row has {short_repr(given)} instead of turns: drop it")
    return turns


def _message(turn: Row) -> dict[str, str]:
    name = turn.get("from", turn.get("role"))
    if (role := _ROLES.get(name)) is None:
        raise DataError(f"a turn has the unknown role {short_repr(name)}: rename it to one of {', '.join(_ROLES)}")
    return {"role": role, "content": turn["value"] if "value" in turn else turn["content"]}
